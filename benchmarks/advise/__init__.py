"""Published tables, our measurements, and the predictions of `advise`."""

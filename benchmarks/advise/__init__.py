"""Published tables and our measurements beside the predictions of `advise`."""

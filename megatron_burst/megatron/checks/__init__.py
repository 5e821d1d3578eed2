"""Settings that cannot be honoured: how they are found and how they are reported."""

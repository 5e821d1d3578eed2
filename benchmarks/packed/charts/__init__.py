"""Packed documents compared with published speeds, simulated: docs/packed-published.md."""

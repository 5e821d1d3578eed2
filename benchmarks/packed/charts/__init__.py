"""Packed documents beside published speeds, simulated: docs/packed-published.md."""

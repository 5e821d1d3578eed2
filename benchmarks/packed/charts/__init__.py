"""Packed documents beside what others have published, simulated: docs/packed-published.md.

`python -m benchmarks.packed.charts` simulates, writes the record, the tables of the page and its
charts."""

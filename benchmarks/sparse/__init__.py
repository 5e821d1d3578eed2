"""Sparse attention over ranks: what it holds, and how long it takes on links of known rates.

`python -m benchmarks.sparse --help`, or `make bench-sparse`. Reading order: `held` (bytes sent and
held), `settings` and `gathered` (what is measured, and the rival), `measure` (what a rank of the
emulated cluster does), `bench` (all runs), `simulated` (512 GPUs by the forecast).
"""

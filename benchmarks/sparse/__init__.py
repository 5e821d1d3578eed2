"""Sparse attention over ranks: memory, and time on links of known rates.

`python -m benchmarks.sparse --help`, or `make bench-sparse`. Reading order: `held` (bytes sent and
held), `settings` and `gathered` (settings and the rival), `measure` (work of a rank of the emulated
cluster), `bench` (all runs), `simulated` (512 GPUs by the forecast), `hybrid` (DeepSeek-V4).
"""

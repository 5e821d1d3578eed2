"""Forecast of tokens per second of packed documents, ours and rivals, on large grids.

`python -m benchmarks.packed` simulates the table of docs/performance.md; `charts` writes
docs/packed-published.md.
"""

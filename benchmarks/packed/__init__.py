"""Forecast: tokens per second of packed documents, ours against rivals, on grids that are too large
to rent. `python -m benchmarks.packed` prints the tables of docs/performance.md; `charts` writes
docs/packed-published.md."""

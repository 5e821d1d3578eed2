"""States of linear attention on links of known rates, compared with rivals.

`python -m benchmarks.linear --help`, or `make bench-linear`. Reading order: `settings` (what is
measured), `maps` (numbers and correct results), `exchange` and `gathered` (rivals), `ours`
(mb.state_scan), `measure` (work of a rank), `bench` (all runs of a setting), `simulated` (256
ranks), `tables` (output). It uses the cluster of `benchmarks.cluster`.
"""

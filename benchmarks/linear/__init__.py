"""States of linear attention on links of known rates, beside rivals.

`python -m benchmarks.linear --help`, or `make bench-linear`. Reading order: `settings` (what is
measured), `maps` (numbers and correct results), `exchange` and `gathered` (rivals), `ours`
(mb.state_scan), `measure` (work of a rank), `bench` (all runs of a setting), `hybrid` (attention
of a hybrid stack), `simulated` (256 ranks), `tables` (output). The cluster is that of
`benchmarks.cluster`.
"""

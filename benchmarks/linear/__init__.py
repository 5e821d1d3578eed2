"""States of linear attention on links of known rates, beside what else there is.

`python -m benchmarks.linear --help`, or `make bench-linear`. Reading order: `settings` (what is
measured), `maps` (the numbers, and what is right), `exchange` and `gathered` (the rivals), `ours`
(mb.state_scan), `measure` (what a rank does), `bench` (all runs of a setting), `hybrid` (the
attention of a hybrid stack), `formula` (seconds by bytes), `simulated` (more ranks than there are
here), `tables` (what is read). The cluster is that of `benchmarks.cluster`.
"""

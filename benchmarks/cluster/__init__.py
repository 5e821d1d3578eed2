"""An emulated cluster on one machine: the ring measured on links of known rates.

One network namespace per rank, two kinds of links of their own rates ("ib" between nodes, "nv"
within), real gloo ranks and real bytes. `python -m benchmarks.cluster --help`, or `make
bench-cluster`. Reading order: `enclosure` (how everything goes away), `network` (the links),
`ranks` (the processes), `problems` and `cells` (what is measured), `measure` (one timed run),
`emulated` (compute that takes a stated time), `mail` (who sends how much to whom), `suites` (the
settings of a question), `bench` (all runs of a setting), `record`, `table` and `results` (what is
written down, said and kept), `heatmap` (the figure); `whole` (a rival); `faults`.
"""

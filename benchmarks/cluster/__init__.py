"""Emulated cluster on one machine: rings measured on links of known rates.

Every rank has a network namespace. There are two kinds of links with their own rates ("ib" between
nodes, "nv" within nodes). Real gloo ranks send real bytes. `python -m benchmarks.cluster --help`,
or `make bench-cluster`. Reading order: `enclosure` (namespaces and their end), `network` (links),
`ranks` (processes), `problems` and `cells` (settings), `measure` (one timed run), `emulated`
(compute of a stated duration), `mail` (bytes between ranks), `suites` (rivals of one question),
`bench` (all runs of a setting), `record`, `table` and `results` (output), `heatmap` (figure),
`whole` (rivals that send whole chunks), `faults`.
"""

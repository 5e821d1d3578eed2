"""One GPU, one call: correctness and speed of kernels, and the overhead of the ring.

`benchmarks/gpu.sh`, or `python -m benchmarks.gpu --help`. It runs tests of tests/gpu and cells of
tables in order of importance until its time is spent. It stores each result immediately, and the
next call continues after the last result. Reading order: `sizes` (what is measured), `jobs`
(order), `journal` (file of results), `supervise` (limits, faults), `worker` and `outcomes` (child
processes: cells, tests), `clock` (timing), `cases`, `rivals`, `sample` and `attention` (one pair of
shards), `ring` (all ranks of a ring on one device), `lm_head`, `store`, `tables` (output),
`everything` (whole run).

With `--device cpu` the same code runs tiny sizes on the CPU's kernels, to test the benchmark
itself.
"""

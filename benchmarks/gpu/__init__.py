"""One GPU, one call: are the kernels right, how fast are they, what does the ring add?

`benchmarks/gpu.sh`, or `python -m benchmarks.gpu --help`. Does tests of tests/gpu and cells of
tables in order of importance until its time is spent, writes each down as it ends, and goes on from
there when it is called again. Reading order: `sizes` (what is measured, on a GPU and on a CPU),
`jobs` (order), `journal` (what is on disk), `supervise` (limits, faults), `worker` and `outcomes`
(the children: cells, tests), `clock` (how a time is taken), `cases`, `rivals`, `sample` and
`attention` (one pair of shards), `ring` (all ranks of a ring on one device), `lm_head`, `store`,
then `tables` (what comes out), `everything` (the whole run).

With `--device cpu` the same code runs on the CPU's kernels, tiny, to be tested itself.
"""

"""One GPU, one call: are the kernels right, how fast are they, what does the ring add?

`benchmarks/gpu.sh`, or `python -m benchmarks.gpu --help`. Runs the tests of tests/gpu, then cells
in order of importance until a time budget is spent, and says which it left out. Reading order:
`sizes` (what is measured, on a GPU and on a CPU), `jobs` (order, budget, what failed), `clock`
(how a time is taken), `cases`, `rivals`, `sample` and `attention` (one pair of shards), `ring` (all
ranks of a ring on one device), `lm_head`, `store`, then `tables` and `plots` (what comes out).

With `--device cpu` the same code runs on the CPU's kernels, tiny, to be tested itself.
"""

# SPDX-License-Identifier: Apache-2.0
"""Attention over selected keys: an indexer scores keys, the best are selected, and exact attention
runs over these alone, over ranks.

`rules` has the selection rules, `indexer` and `top_k` apply them, `attention` with `kernels`
attends to a `Selection`, and `loss` trains the indexer. `plans` and `pairs` make them run in the
loop of `execution/ring.py`. `megatron/` has the layers of Megatron.
"""

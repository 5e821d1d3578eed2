# SPDX-License-Identifier: Apache-2.0
"""Plugin for attention over selected keys, on context-parallel ranks.

An indexer scores keys, the keys with the best scores are selected, and exact attention is computed
over the selected keys. `rules` has the selection rules, and `indexer` and `top_k` apply them.
`attention` with `kernels` computes attention over a `Selection`. `loss` trains the indexer. `plans`
and `pairs` connect these operations to the loop of `execution/ring.py`. `megatron/` has the layers
of Megatron.
"""

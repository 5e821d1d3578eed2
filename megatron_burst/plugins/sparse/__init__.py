# SPDX-License-Identifier: Apache-2.0
"""Plugin for attention over selected keys, on context-parallel ranks.

An indexer scores keys. Each query attends only to the keys with the best scores, by exact softmax
attention. `rules` has the selection rules; `indexer` and `top_k` apply them. `attention` and
`kernels` compute attention to a `Selection`. `loss` has the loss that trains the indexer. `plans`
and `pairs` connect these operations to the loop of `execution/ring.py`. `megatron/` has Megatron
layers that use them.
"""

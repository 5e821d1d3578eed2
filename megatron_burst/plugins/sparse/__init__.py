# SPDX-License-Identifier: Apache-2.0
"""Attention over selected keys, on context-parallel ranks.

An indexer scores keys, the best keys are selected, and exact attention runs over the selected keys.
`rules` has the selection rules, and `indexer` and `top_k` apply them. `attention` with `kernels`
attends to a `Selection`. `loss` trains the indexer. `plans` and `pairs` connect these operations to
the loop of `execution/ring.py`. `megatron/` has the layers of Megatron.
"""

# SPDX-License-Identifier: Apache-2.0
"""Attention over selected keys: an indexer scores keys, the best are selected, and exact attention
runs over these alone, over ranks.

`rules` has the selection rules, `indexer` and `top_k` apply them, `attention` with `kernels`
attends to a `Selection`, `loss` trains the indexer; `plans` and `pairs` make them run in the loop
of `execution/ring.py`.
"""

from __future__ import annotations

from .attention import sparse_attention
from .indexer import select
from .loss import indexer_loss
from .selection import Selection

__all__ = ["Selection", "indexer_loss", "select", "sparse_attention"]

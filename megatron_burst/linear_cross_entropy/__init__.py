# SPDX-License-Identifier: Apache-2.0
"""LM head and cross-entropy loss as one operation that never materializes all logits.

The algorithm is Algorithm 3 of BurstEngine (arXiv 2509.19836), with the corrections that
`docs/lm-head.md` describes. For each tile of tokens, one matrix product computes the logits, the
softmax gradient overwrites the logits, and two products compute the gradients of hidden states and
weight.

`validate` contains the public function, and `checks` checks its arguments.
"""

from __future__ import annotations

from .function import Sink
from .tiled_loop import describe
from .validate import linear_cross_entropy

__all__ = ["Sink", "describe", "linear_cross_entropy"]

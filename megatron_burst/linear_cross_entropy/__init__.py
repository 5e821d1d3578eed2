# SPDX-License-Identifier: Apache-2.0
"""LM head and cross-entropy loss as one operation that never materializes all logits.

The algorithm is Algorithm 3 of BurstEngine (arXiv 2509.19836), corrected. For each tile of tokens
one product computes the logits, their softmax gradient replaces them in place, and two products
compute the gradients.

`validate` contains the public function, `checks` the checks of its arguments.
"""

from __future__ import annotations

from .function import Sink
from .tiled_loop import describe
from .validate import linear_cross_entropy

__all__ = ["Sink", "describe", "linear_cross_entropy"]

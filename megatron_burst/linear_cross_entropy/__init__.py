# SPDX-License-Identifier: Apache-2.0
"""The LM head and its cross-entropy loss as one operation that never holds all logits.

Algorithm 3 of BurstEngine (arXiv 2509.19836), corrected: tile by tile, one product makes the
logits, their softmax gradient replaces them in place, and two products make the gradients.

`validate` has the public function; `checks` checks its arguments.
"""

from __future__ import annotations

from .function import Sink
from .tiled_loop import describe
from .validate import linear_cross_entropy

__all__ = ["Sink", "describe", "linear_cross_entropy"]

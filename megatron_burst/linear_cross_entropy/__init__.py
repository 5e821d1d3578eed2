"""The LM head and its loss as one operation, with logits that never all exist.

Algorithm 3 of BurstEngine (arXiv 2509.19836), corrected: tile by tile one product for the logits,
their softmax gradient in their own place, two products for the gradients. What is refused is
`checks`'s (of the options, `options`'s), the formula of a token's loss `formula`'s, the size of a
tile `tiling`'s, the work on a tile `rows`'s and `products`'s, the tensor-parallel group `split`'s,
the order of it all `tiled_loop`'s, and what is kept between forward and backward `function`'s.
"""

from __future__ import annotations

from .function import Sink
from .tiling import describe
from .validate import linear_cross_entropy

__all__ = ["Sink", "describe", "linear_cross_entropy"]

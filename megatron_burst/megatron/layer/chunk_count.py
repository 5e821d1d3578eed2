"""How many chunks of rows "auto" takes for an attention half.

A rule about memory alone: more chunks only send keys round more often. The working set of one chunk
is made at most a quarter of what is as long as the rows, whatever the number of chunks: infinitely
many would save a fifth more. But chunks of fewer than `FEWEST_ROWS` rows, which leave short matrix
products and short messages, are not made.
"""

from __future__ import annotations

import math
from typing import Any

from megatron_burst.recompute.tile_counts import FEWEST_ROWS
from megatron_burst.units import byte_size


def chunk_count(q: Any, k: Any, v: Any, *, width: int, blocks: int) -> tuple[int, str]:
    """The number of chunks, the same on all ranks, and why it is that.

    q [s, b, h, d], k [s, b, g, d], v [s, b, g, w]: of all rows of the shard, only shapes and
    dtypes count. width: of hidden states; blocks: ranks that share their rows.
    """
    chunk, whole = bytes_per_row(q, k, v, width, blocks)
    rows, batch = q.shape[:2]
    count = max(1, min(math.ceil(4 * chunk / whole), rows // FEWEST_ROWS))
    held = byte_size(whole * rows * batch)
    return count, (
        f"{count} of {math.ceil(rows / count):,} rows for attention halves of layers, each "
        f"{byte_size(math.ceil(chunk * rows * batch / count))} beside {held} for all {rows:,} rows"
    )


def bytes_per_row(q: Any, k: Any, v: Any, width: int, blocks: int) -> tuple[int, int]:
    """(of a chunk, of what is as long as all rows) in backward, where both are largest.

    A chunk: input, norm, output, gradients of these (a rank's share of the rows), the gathered
    input and its gradient, q, k, v before and after rope and their gradients, of q also fp32, out
    and its gradient. All rows: hidden states and the gradients of input and output, k and v and
    their fp32 gradients, out.
    """
    queries, keys, values = (x[0, 0].numel() for x in (q, k, v))
    out = q.shape[2] * v.shape[3]
    share, kv = -(-width // blocks), keys + values
    chunk = q.itemsize * (6 * share + 2 * width + 3 * (queries + kv) + 2 * out) + 4 * queries
    whole = q.itemsize * (3 * share + kv + out) + 4 * kv
    return chunk, whole

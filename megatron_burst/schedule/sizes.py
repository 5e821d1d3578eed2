# SPDX-License-Identifier: Apache-2.0
"""The sizes of what one rank brings to an attention call, and the bytes of a row of each family."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from .demand import RowBytes
from .head_shares import Share
from .rings import Schedule


@dataclass(frozen=True)
class Sizes:
    """What one rank brings to one attention call on its ring.

    tokens: rows of the rank; heads, kv_heads: of its queries and of its keys and values; width: of
    queries and keys; value_width: of values. The itemsizes are bytes per element: of q, k, v and
    out, of lse and delta, of what is summed over ranks (travelling gradients, partial outputs).
    needs_grad: which of q, k and v need a gradient.
    """

    tokens: int
    batch: int
    heads: int
    kv_heads: int
    width: int
    value_width: int
    itemsize: int
    stat_itemsize: int
    wire_itemsize: int
    needs_grad: tuple[bool, bool, bool]

    def shared(self, ulysses: int) -> Sizes:
        """Those of a rank on its ring, from those of one before ranks share heads: all rows of its
        ulysses group, its share of the heads.
        """
        return replace(
            self,
            tokens=self.tokens * ulysses,
            heads=Share(self.heads, ulysses).each,
            kv_heads=Share(self.kv_heads, ulysses).each,
        )

    @cached_property
    def forward(self) -> RowBytes:
        """Bytes of a row in forward: a partial output travels with its lse."""
        query, key, value, out = self._elements
        partial = out * self.wire_itemsize + self.batch * self.heads * self.stat_itemsize
        kv = (key + value) * self.itemsize
        return RowBytes(kv, query * self.itemsize, dkv=0, dquery=0, out=partial)

    @cached_property
    def backward(self) -> RowBytes:
        """Bytes of a row in backward: queries are Q, dO, lse and delta (O itself does not travel).

        A gradient that is not needed does not travel.
        """
        query, key, value, out = self._elements
        q, k, v = self.needs_grad
        stats = 2 * self.batch * self.heads * self.stat_itemsize
        return RowBytes(
            kv=(key + value) * self.itemsize,
            query=(query + out) * self.itemsize + stats,
            dkv=(k * key + v * value) * self.wire_itemsize,
            dquery=q * query * self.wire_itemsize,
            out=0,
        )

    def row_bytes(self, schedule: Schedule) -> RowBytes:
        """Bytes of a row in the pass of a schedule; only forward has partial outputs."""
        return self.forward if schedule.row_bytes.out else self.backward

    def chunk_bytes(self, family: str) -> int:
        """Payload bytes of all rows of a chunk: of queries, what travels in backward."""
        each = (getattr(row, family) for row in (self.forward, self.backward))
        return self.tokens * max(each)

    @property
    def _elements(self) -> tuple[int, int, int, int]:
        """Elements of q, k, v and out in one row."""
        heads, kv_heads = self.batch * self.heads, self.batch * self.kv_heads
        return (
            heads * self.width,
            kv_heads * self.width,
            kv_heads * self.value_width,
            heads * self.value_width,
        )

    def scattered_bytes(self, ranks: int, again: bool = False) -> tuple[int, int]:
        """Bytes that one rank of a ulysses group of `ranks` sends to each other one, in forward and
        in backward. These are the sizes on its ring, of heads that are shared already: of fewer
        key/value heads than ranks, several take a copy of the same one. again: backward, of row
        chunks, brings q with delta again.
        """
        query, key, value, out = (self.tokens * each for each in self._elements)
        q, k, v = self.needs_grad
        # Forward brings q, k and v to where their heads are computed and out back to its rows;
        # backward brings dout there and the gradients back.
        forward = (query + key + value + out) * self.itemsize
        back = out * self.itemsize + (q * query + k * key + v * value) * self.wire_itemsize
        if again:
            stats = self.tokens * self.batch * self.heads * self.stat_itemsize
            back += query * self.itemsize + stats
        return forward // ranks, back // ranks

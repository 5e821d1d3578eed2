# SPDX-License-Identifier: Apache-2.0
"""Sizes of one rank's tensors in an attention call, and the bytes of their rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from .demand import RowBytes
from .head_shares import Share
from .rings import Schedule


@dataclass(frozen=True)
class Sizes:
    """Sizes of one rank's tensors in an attention call.

    Attributes:
        tokens: Number of rows of the rank.
        batch: Batch size.
        heads: Number of query heads.
        kv_heads: Number of key and value heads.
        width: Head width of queries and keys.
        value_width: Head width of values.
        itemsize: Bytes per element of q, k, v and out.
        stat_itemsize: Bytes per element of lse and delta.
        wire_itemsize: Bytes per element of the partial results that are sent: gradients and partial
            outputs.
        needs_grad: Three bools: whether q, k and v need a gradient.
        key_tokens: Number of key rows of the rank. None: equal to `tokens`.
        values_are_keys: True if values and keys are the same tensor, which is then sent once.
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
    key_tokens: int | None = None
    values_are_keys: bool = False

    @property
    def key_rows(self) -> int:
        """Number of key rows of the rank."""
        return self.tokens if self.key_tokens is None else self.key_tokens

    def shared(self, ulysses: int) -> Sizes:
        """Return the sizes of one rank after the all-to-all in ulysses groups of `ulysses` ranks.

        A rank then has all rows of its ulysses group and its share of the heads. `self` must hold
        the sizes before the all-to-all.
        """
        return replace(
            self,
            tokens=self.tokens * ulysses,
            key_tokens=self.key_rows * ulysses,
            heads=Share(self.heads, ulysses).heads_per_rank,
            kv_heads=Share(self.kv_heads, ulysses).heads_per_rank,
        )

    @cached_property
    def forward(self) -> RowBytes:
        """Bytes of a row of each kind of tensors in forward; a partial output includes its lse."""
        query, key, value, out = self._elements
        partial = out * self.wire_itemsize + self.batch * self.heads * self.stat_itemsize
        kv = (key + value) * self.itemsize
        return RowBytes(kv, query * self.itemsize, dkv=0, dquery=0, out=partial)

    @cached_property
    def backward(self) -> RowBytes:
        """Bytes of a row of each kind of tensors in backward.

        Queries are sent as Q, dO, lse and delta; O is not sent. A gradient that is not needed is
        not sent.
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
        """Return the bytes of a row of each family (kind of tensors) in the pass of `schedule`."""
        return self.forward if schedule.row_bytes.out else self.backward

    def chunk_bytes(self, family: str) -> int:
        """Return the bytes of a whole chunk in forward or in backward, whichever are more.

        Args:
            family: Kind of tensors, such as "kv".
        """
        row_bytes = (getattr(families, family) for families in (self.forward, self.backward))
        rows = self.key_rows if family in ("kv", "dkv") else self.tokens
        return rows * max(row_bytes)

    @property
    def _elements(self) -> tuple[int, int, int, int]:
        """Number of elements of q, k, v and out in one row; 0 for v if values are the keys."""
        heads, kv_heads = self.batch * self.heads, self.batch * self.kv_heads
        return (
            heads * self.width,
            kv_heads * self.width,
            0 if self.values_are_keys else kv_heads * self.value_width,
            heads * self.value_width,
        )

    def scattered_bytes(self, ranks: int, resends_q: bool = False) -> tuple[int, int]:
        """Return the bytes that a rank sends to each other rank of its ulysses group.

        `self` must hold the sizes on the ring, after the all-to-all. If there are fewer key/value
        heads than ranks, several ranks receive a copy of the same head.

        Args:
            ranks: Number of ranks of the ulysses group.
            resends_q: True if backward sends q and delta again, as with row chunks.

        Returns:
            Bytes in forward and bytes in backward.
        """
        query, key, value, out = (
            rows * elements
            for rows, elements in zip(
                (self.tokens, self.key_rows, self.key_rows, self.tokens),
                self._elements,
                strict=True,
            )
        )
        q, k, v = self.needs_grad
        # Forward sends q, k and v to the ranks that compute their heads, and sends out back.
        # Backward sends dout to these ranks, and sends the gradients back.
        forward = (query + key + value + out) * self.itemsize
        back = out * self.itemsize + (q * query + k * key + v * value) * self.wire_itemsize
        if resends_q:
            stats = self.tokens * self.batch * self.heads * self.stat_itemsize
            back += query * self.itemsize + stats
        return forward // ranks, back // ranks

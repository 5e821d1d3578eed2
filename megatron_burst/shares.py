"""Which heads each rank of a head group takes, how many ranks may share them, and which of the
groups of heads of one rank end last.

Plain arithmetic, for `head_parallel` and `attention`, which move them, and for `options` and
`forecast`, which ask what is possible before there are process groups.
"""

from __future__ import annotations

from typing import NamedTuple


class Share(NamedTuple):
    """Which of `heads` the ranks of a head group of `size` take."""

    heads: int
    size: int

    def of(self, peer: int) -> slice:
        """The heads of `peer`: an equal share, or the one head that it and others need."""
        if self.heads >= self.size:
            each = self.heads // self.size
            return slice(peer * each, (peer + 1) * each)
        head = peer * self.heads // self.size
        return slice(head, head + 1)

    @property
    def each(self) -> int:
        return max(1, self.heads // self.size)


def shareable(heads: int, kv_heads: int, size: int) -> bool:
    """Can `size` ranks share these heads?"""
    return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)


def check_heads(heads: int, kv_heads: int, size: int) -> None:
    """Raise ValueError unless `size` ranks can share the heads."""
    if heads % size:
        raise ValueError(
            f"groups: {size} head-parallel ranks must divide the {heads} query heads; "
            f"use head={_largest_divisor(heads, size)}"
        )
    if kv_heads % size and size % kv_heads:
        raise ValueError(
            f"groups: {size} head-parallel ranks must divide the {kv_heads} key/value heads, or "
            "be a multiple of them"
        )


def _largest_divisor(number: int, limit: int) -> int:
    return max(d for d in range(1, limit + 1) if number % d == 0)


def late_groups(count: int) -> int:
    """How many of `count` groups of heads, the last ones, compute their own pair at the end."""
    return min(2, count // 2)

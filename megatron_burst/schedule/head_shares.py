"""Which heads each rank of a ulysses group takes, how many ranks may share them, and which of the
head chunks of one rank end last.

Plain arithmetic, for `head_parallel` and `attention`, which move them, and for `options` and
`forecast`, which ask what is possible before there are process groups.
"""

from __future__ import annotations

from typing import NamedTuple

from .topology import Topology, alternatives


class Share(NamedTuple):
    """Which of `heads` the ranks of a ulysses group of `size` take."""

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


def check_heads(heads: int, kv_heads: int, topology: Topology, algorithm: str) -> None:
    """Raise ValueError unless the ranks of each ulysses group can share the heads; it says which
    sizes of ulysses groups can, on these ranks and nodes."""
    size = topology.ulysses
    if shareable(heads, kv_heads, size):
        return
    if heads % size:
        reason = f"{size} ulysses ranks must divide the {heads} query heads"
    else:
        reason = (
            f"{size} ulysses ranks must divide the {kv_heads} key/value heads, or be a "
            "multiple of them"
        )
    sizes = [n for n in topology.ulysses_that_fit if shareable(heads, kv_heads, n)]
    fix = f"make mb.Groups with ulysses={alternatives(sizes)}"
    if algorithm in ("ulysses", "hybrid"):  # ulysses wants all ranks, hybrid more than one
        some = "algorithm='hybrid' with head above 1, " * any(n > 1 for n in sizes)
        fix += f" (and {some}algorithm='burst' with any)"
    raise ValueError(f"groups: {reason}; {fix}")


def deferred_chunks(count: int) -> int:
    """How many of `count` head chunks, the last ones, compute their own pair at the end."""
    return min(2, count // 2)

"""How heads are divided: among the ranks of a ulysses group, and into head chunks on one rank.

Plain arithmetic, so that validation, the executor and the simulator use the same rule, also before
there are process groups. Source: DeepSpeed-Ulysses (arXiv 2309.14509) for equal shares; where there
are fewer key/value heads than ranks, several ranks take a copy of the same head.
"""

from __future__ import annotations

from typing import NamedTuple

from .topology import Topology, alternatives


class Share(NamedTuple):
    """How `size` ranks of a ulysses group divide `heads` heads."""

    heads: int
    size: int

    def of(self, peer: int) -> slice:
        """The heads of rank `peer` of the group: an equal share, or the one head that its queries
        need and that it shares with other ranks."""
        if self.heads >= self.size:
            each = self.heads // self.size
            return slice(peer * each, (peer + 1) * each)
        head = peer * self.heads // self.size
        return slice(head, head + 1)

    @property
    def each(self) -> int:
        """How many heads every rank takes."""
        return max(1, self.heads // self.size)


def shareable(heads: int, kv_heads: int, size: int) -> bool:
    """Can `size` ranks share these heads?"""
    return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)


def check_heads(heads: int, kv_heads: int, topology: Topology, algorithm: str) -> None:
    """Raise ValueError unless the ranks of each ulysses group can share the heads.

    The message names the sizes of ulysses groups that can, on these ranks and nodes.
    """
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
        some = "algorithm='hybrid' with head above 1, " if any(n > 1 for n in sizes) else ""
        fix += f" (and {some}algorithm='burst' with any)"
    raise ValueError(f"groups: {reason}; {fix}")


def deferred_chunks(count: int) -> int:
    """How many of `count` head chunks, the last ones, compute their own pair at the end.

    The pairs of the others hide their first hops, and their own pairs hide the last gradient hops.
    """
    return min(2, count // 2)

# SPDX-License-Identifier: Apache-2.0
"""The division of heads: among the ranks of a ulysses group, and into head chunks on one rank.

The module also defines the order of the rows on a rank after the all-to-all. It needs no process
groups, so checks, the executor and the simulator use the same functions. Equal shares are those of
DeepSpeed-Ulysses (arXiv 2309.14509). If there are fewer key/value heads than ranks, several ranks
receive a copy of the same head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..layout import Span
from .topology import Topology, alternatives


class Share(NamedTuple):
    """The division of `heads` heads among `size` ranks of a ulysses group."""

    heads: int
    size: int

    def of(self, peer: int) -> slice:
        """Return the heads of the rank with index `peer` in the ulysses group.

        Every rank has equally many heads. If there are fewer heads than ranks, a rank has the one
        head that its queries need, and several ranks have copies of the same head.
        """
        if self.heads >= self.size:
            per_rank = self.heads // self.size
            return slice(peer * per_rank, (peer + 1) * per_rank)
        head = peer * self.heads // self.size
        return slice(head, head + 1)

    @property
    def heads_per_rank(self) -> int:
        """Number of heads of every rank."""
        return max(1, self.heads // self.size)


def shareable(heads: int, kv_heads: int, size: int) -> bool:
    """Return True if `size` ranks can share `heads` query heads and `kv_heads` key/value heads."""
    return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)


def check_heads(heads: int, kv_heads: int, topology: Topology, algorithm: str) -> None:
    """Raise ValueError unless the ranks of each ulysses group can share the heads.

    The message lists the sizes of ulysses groups that work on these ranks and nodes.
    """
    size = topology.ulysses
    if shareable(heads, kv_heads, size):
        return
    if heads % size:
        reason = f"ulysses={size} must divide the {heads} query heads"
    else:
        reason = (
            f"ulysses={size} must divide the {kv_heads} key/value heads, or be a multiple of "
            f"{kv_heads}"
        )
    sizes = [n for n in topology.ulysses_that_fit if shareable(heads, kv_heads, n)]
    fix = f"make mb.Groups with ulysses={alternatives(sizes)}"
    if algorithm in ("ulysses", "hybrid"):  # ulysses needs all ranks, hybrid more than one
        hybrid = " or, with ulysses above 1, algorithm='hybrid'"
        fix += f", and use algorithm='burst'{hybrid * any(n > 1 for n in sizes)}"
    raise ValueError(f"groups: {reason}; {fix}")


def shared_spans(shards: Sequence[Sequence[Span]]) -> tuple[Span, ...]:
    """Return the spans of the rows that each rank of a ulysses group has after the all-to-all.

    All ranks of the group then have the same rows: the rows of all members. The rows are sorted by
    position if that makes fewer spans. With zigzag and striped layouts, the sorted rows are
    contiguous intervals of the sequence, which need few kernel calls.

    Args:
        shards: Spans (regularly spaced positions) of each member before the all-to-all.
    """
    if len(shards) == 1:
        return tuple(shards[0])
    spans = tuple(span for shard in shards for span in shard)
    joined = _joined_stripes(spans) or _joined_runs(spans)
    return spans if joined is None else tuple(joined)


def shared_order(shards: Sequence[Sequence[Span]]) -> np.ndarray | None:
    """Return the order of the rows on a rank after the all-to-all of its ulysses group.

    Args:
        shards: Spans (regularly spaced positions) of each member before the all-to-all.

    Returns:
        int64: for each row after the all-to-all, its index in the concatenated rows of all members.
        None if rows stay in the order of the members.
    """
    spans = tuple(span for shard in shards for span in shard)
    if shared_spans(shards) == spans:
        return None
    positions = np.concatenate([span.positions() for span in spans])
    return None if (np.diff(positions) > 0).all() else np.argsort(positions)


def _joined_stripes(spans: Sequence[Span]) -> list[Span] | None:
    """Join striped spans into one span with a smaller stride; return None if that is impossible."""
    if len(spans) < 2:
        return None
    starts, (_, stride, length) = sorted(span.start for span in spans), spans[0]
    step = stride // len(spans)
    equal = all(span[1:] == (stride, length) for span in spans) and step * len(spans) == stride
    if not equal or (np.diff(starts) != step).any():
        return None
    return [Span(starts[0], step, length * len(spans))]


def _joined_runs(spans: Sequence[Span]) -> list[Span] | None:
    """Join contiguous spans that are adjacent, and sort the result by position.

    Returns:
        The spans, or None if no two spans are adjacent or if a span is not contiguous.
    """
    if any(span.stride > 1 for span in spans if span.length > 1):
        return None
    joined: list[Span] = []
    for start, _, length in sorted(spans):
        if joined and joined[-1].last + 1 == start:
            last = joined.pop()
            start, length = last.start, last.length + length
        joined.append(Span(start, 1, length))
    return joined if len(joined) < len(spans) else None


def deferred_chunks(count: int) -> int:
    """Return the number of head chunks that compute the pair of the rank's own chunks at the end.

    A head chunk is a group of heads with its own transfers. These are the last of `count` head
    chunks. Pairs of earlier head chunks hide their first transfers. The pairs of the rank's own
    chunks hide their last transfers of gradients.
    """
    return min(2, count // 2)

"""Layout `balanced`: packed documents of mixed lengths, equal tokens and nearly equal work on every
rank, most documents whole on one rank.

Decides how documents lie in a pack and on nodes; the shares of the ranks are `mixture`'s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from .layouts import Layout, Span, document_bounds, integer, padding_documents
from .mixture import CAUSAL, Costs, Share, Window, mix


class Balanced(Layout):
    """Every rank holds S / `cp_size` tokens with nearly equally many visible pairs.

    The longest documents are spread in mirrored shares over neighbouring ranks, those of one node
    where they fit, and nearly all others lie on one rank. Spans are in the order of positions.

    cu_seqlens: cumulative lengths of the documents, of any length; the sum must be a multiple of
    `cp_size`. per_node: ranks per node, for placement only; default: what `cp_size` and 8 have in
    common. windows: (left, right) of every kind of layer, as of `masks.Window` within a document;
    their pairs are summed. (None, 0) is causal, (None, None) sees all. padding: indices of
    documents that are padding: nothing sees them, and they see nothing. Raises ValueError for
    arguments that are none of these.
    """

    name = "balanced"

    def __init__(
        self,
        cp_size: int,
        cu_seqlens: Sequence[int] | np.ndarray,
        *,
        per_node: int | None = None,
        windows: Sequence[Window] = (CAUSAL,),
        padding: Sequence[int] = (),
    ):
        super().__init__(cp_size)
        bounds = document_bounds(cu_seqlens)
        self.bounds = tuple(bounds.tolist())
        total = self.bounds[-1]
        if not total or total % self.cp_size:
            wanted = max(1, -(-total // self.cp_size)) * self.cp_size
            raise ValueError(
                f"cu_seqlens: layout balanced over {cp_size} ranks needs a positive multiple of "
                f"{cp_size} tokens, got {total}; pad the pack to {wanted}"
            )
        self.per_node = self._per_node(per_node)
        if not isinstance(windows, Sequence) or not windows:
            raise ValueError(f"windows: name at least one kind of layer, got {windows!r}")
        self.windows = tuple(_window(each) for each in windows)
        self.padding = padding_documents(padding, len(self.bounds) - 1)

    def _per_node(self, given: int | None) -> int:
        if given is None:
            return math.gcd(self.cp_size, 8)
        size = integer("per_node", given)
        if size < 1 or self.cp_size % size:
            raise ValueError(f"per_node must divide the {self.cp_size} ranks, got {given}")
        return size

    def __repr__(self) -> str:
        return (
            f"Balanced(cp_size={self.cp_size}, cu_seqlens={list(self.bounds)}, "
            f"per_node={self.per_node}, windows={self.windows}, padding={self.padding})"
        )

    def describe(self) -> str:
        """Its name, and the pairs of the busiest rank over the mean."""
        return f"{self.name} (busiest rank {self.balance:.2f} x the mean)"

    def check(self, seq_len: int) -> None:
        if seq_len != self.bounds[-1]:
            raise ValueError(f"seq_len: the documents end at {self.bounds[-1]}, got {seq_len}")

    @property
    def pairs(self) -> tuple[int, ...]:
        """Visible pairs of each rank's queries, summed over `windows`."""
        return tuple(sum(map(self._costs.of, shares)) for shares in self.shares)

    @property
    def balance(self) -> float:
        """Pairs of the busiest rank over the mean; 1 where there is none."""
        pairs = self.pairs
        return max(pairs) * len(pairs) / (sum(pairs) or 1) or 1.0

    @cached_property
    def _costs(self) -> Costs:
        return Costs(np.diff(self.bounds).tolist(), self.windows, self.padding)

    @cached_property
    def shares(self) -> tuple[list[Share], ...]:
        """What each rank takes."""
        costs = self._costs
        documents = [Share(i, 0, n) for i, n in enumerate(costs.lengths) if n]
        nodes = mix(documents, self.cp_size // self.per_node, costs)
        return tuple(each for node in nodes for each in mix(node, self.per_node, costs))

    @cached_property
    def _all_spans(self) -> tuple[tuple[Span, ...], ...]:
        starts, stops, owners = self._pieces()
        order = np.lexsort((starts, owners))
        starts, stops, owners = starts[order], stops[order], owners[order]
        new = np.ones(len(starts), dtype=bool)  # whether a piece does not go on with the last one
        new[1:] = (starts[1:] != stops[:-1]) | (owners[1:] != owners[:-1])
        last = np.append(np.flatnonzero(new)[1:], len(starts)) - 1
        starts, stops, owners = starts[new], stops[last], owners[new]
        edges = np.searchsorted(owners, np.arange(self.cp_size + 1))
        spans = [Span(a, 1, b - a) for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]
        return tuple(
            tuple(spans[a:b]) for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
        )

    def _pieces(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """First position, the one after the last, and rank of the two ends of every share."""
        owners = np.repeat(np.arange(self.cp_size), [len(each) for each in self.shares])
        fields = np.array([share for each in self.shares for share in each], dtype=np.int64)
        document, first, stop = fields.reshape(-1, 3).T
        begin, end = (np.array(self.bounds)[document + i] for i in (0, 1))
        starts = np.concatenate([begin + (first + 1) // 2, end - stop // 2])
        stops = np.concatenate([begin + (stop + 1) // 2, end - first // 2])
        owners, some = np.tile(owners, 2), stops > starts
        return starts[some], stops[some], owners[some]

    def _spans(self, rank: int, seq_len: int) -> tuple[Span, ...]:
        return self._all_spans[rank]


def _window(given: object) -> Window:
    sides = tuple(given) if isinstance(given, Sequence) else ()
    right = len(sides) == 2 and all(
        side is None or (type(side) is int and side >= 0) for side in sides
    )
    if not right:
        raise ValueError(
            "windows must hold (left, right) of each kind of layer, integers from 0 on or None for "
            f"no limit, got {given!r}"
        )
    return sides  # pyright: ignore[reportReturnType]

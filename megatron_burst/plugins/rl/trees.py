# SPDX-License-Identifier: Apache-2.0
"""Prefix trees: trajectories that share prefixes as one sequence in which each prefix stands once.

A trajectory is a list of tokens, such as a prompt with one sampled answer. `pack` merges common
prefixes into a tree of segments (runs of tokens without a branch) and lays its rows out depth
first, so that `masks.Tree` describes who sees whom by one bound per row. Every row but the first of
a root is predicted once, by the row before it on its path: that pair is an *edge*, and what is
computed per edge (log-probabilities, entropies) serves all trajectories through it.
Needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ...layout import Layout, integer
from ...layout.layouts import counted
from ...masks import Tree

__all__ = ["Edges", "PrefixTree", "from_segments", "pack"]


LARGEST = 2**31 - 1  # token


class Edges(NamedTuple):
    """Columns: the predictions of a tree, in the order of the rows that are predicted.

    row: int64 [E], the row whose hidden state predicts; a row before a branch stands once per
    child. label: int64 [E], the token that is predicted. target: int64 [E], the row of that token.
    weight: float64 [E], the weights of the trajectories through the edge, summed. first, stop:
    int64 [E], the trajectories through the edge are `PrefixTree.order[first:stop]`.
    """

    row: np.ndarray
    label: np.ndarray
    target: np.ndarray
    weight: np.ndarray
    first: np.ndarray
    stop: np.ndarray

    def on(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The edges that rows of a shard predict, and the local rows that do.

        positions: int64 [rows], the positions of a shard (`Layout.positions`). Returns two int64
        arrays of one length: indices of edges, ascending, and indices into `positions`.
        """
        positions = np.asarray(positions)
        if not len(positions):
            return np.empty((2, 0), dtype=np.int64)[0], np.empty(0, dtype=np.int64)
        order = np.argsort(positions, kind="stable")
        place = np.searchsorted(positions, self.row, sorter=order)
        local = order[np.minimum(place, len(order) - 1)]
        here = np.flatnonzero(positions[local] == self.row)
        return here, local[here]


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """Trajectories as one sequence of S rows, in depth-first order; made by `pack`.

    tokens: int64 [S], 0 in rows of padding. positions: int64 [S], each row's place on the path from
    its root, for positional embeddings. parents: int64 [S], the row before it on the path, -1 for
    none. out: int64 [S], the first row after its subtree, for `masks.Tree`; 0 for padding, which
    lies at the end. edges: the predictions. order: int64, the trajectories with
    tokens by the rows at which they end. paths: the rows of each trajectory.
    """

    tokens: np.ndarray
    positions: np.ndarray
    parents: np.ndarray
    out: np.ndarray
    edges: Edges
    order: np.ndarray
    paths: tuple[np.ndarray, ...]

    @cached_property
    def mask(self) -> Tree:
        """Each row sees itself and its ancestors."""
        return Tree(self.out)

    @property
    def rows(self) -> int:
        """How many rows are no padding: the distinct prefixes of the trajectories."""
        return int(np.count_nonzero(self.out))

    @property
    def trajectory_tokens(self) -> int:
        """The tokens of all trajectories, each on its own."""
        return sum(map(len, self.paths))

    @property
    def multiplicity(self) -> np.ndarray:
        """int64 [S]: how many trajectories pass each row; 0 for padding."""
        rows = np.concatenate([*self.paths, np.empty(0, dtype=np.int64)])
        return np.bincount(rows, minlength=len(self.tokens))

    def describe(self) -> str:
        """One line: what merging saves."""
        before, pairs = self.trajectory_tokens, sum(len(x) * (len(x) + 1) // 2 for x in self.paths)
        return (
            f"{len(self.paths)} trajectories of {before:,} tokens as {self.rows:,} rows "
            f"({before / max(self.rows, 1):.2f} x fewer), {pairs / max(self.mask.pairs, 1):.2f} x "
            f"fewer pairs in attention, depth up to {int(self.positions.max()) + 1:,}"
        )

    def unpack(self, values: Any) -> list[Any]:
        """What belongs to each trajectory, of values per edge or per row.

        values: a numpy array or tensor [E, ...] or [S, ...]. Returns one of the same kind per
        trajectory of n tokens: of edges, [max(n - 1, 0), ...], of which entry i belongs to the
        prediction of token i + 1; of rows, [n, ...]. Differentiable: gradients of shared rows add
        up. Raises ValueError for other lengths.
        """
        size = values.shape[0] if getattr(values, "shape", ()) else None
        if size == len(self.tokens):
            return [values[path] for path in self.paths]
        if size == len(self.edges.row):
            return [values[self._edge[path[1:]]] for path in self.paths]
        raise ValueError(
            f"values: unpack takes one per edge ({len(self.edges.row)}) or one per row "
            f"({len(self.tokens)}), as an array or tensor, got {_told(values)}"
        )

    @cached_property
    def _edge(self) -> np.ndarray:
        """int64 [S]: the edge that predicts each row, -1 for none."""
        edge = np.full(len(self.tokens), -1)
        edge[self.edges.target] = np.arange(len(self.edges.target))
        return edge

    def edges_on(self, layout: Layout, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """`Edges.on` the shard that `rank` holds: which edges it predicts, and from which of its
        local rows.
        """
        return self.edges.on(layout.positions(rank, len(self.tokens)))


class _Segment(NamedTuple):
    """Tokens begin..end (exclusive) of trajectory `source`, below segment `parent`, -1 for none."""

    parent: int
    source: int
    begin: int
    end: int


def pack(
    trajectories: Sequence[Any], *, weights: Sequence[Any] | None = None, multiple: int = 1
) -> PrefixTree:
    """Merge the common prefixes of trajectories into a tree.

    trajectories: sequences of token ids from 0 on (lists, numpy arrays, host tensors), in any order
    and of any length, also none; equal ones share all rows. Trajectories that share no first token
    are trees of their own, in one pack. weights: one per trajectory, a number or one per token (the
    first predicts nothing and is ignored); default: 1. multiple: padding at the end makes the rows
    a multiple of it, which layouts ask for.

    Raises ValueError for tokens or weights that are none, or if there is no token at all.
    """
    tokens = _of_trajectories(trajectories)
    segments: list[_Segment] = []
    leaf = [-1] * len(tokens)
    path: list[int] = []  # segments of the trajectory before
    for i, shared in zip(*_neighbours(tokens), strict=True):
        while path and segments[path[-1]].begin >= shared:
            path.pop()
        if path and segments[path[-1]].end > shared:  # branches inside a segment: cut it in two
            low = segments[path[-1]]
            segments.append(low._replace(end=shared))
            segments[path[-1]] = low._replace(begin=shared, parent=len(segments) - 1)
            path[-1] = len(segments) - 1
        if len(tokens[i]) > shared:
            segments.append(_Segment(path[-1] if path else -1, i, shared, len(tokens[i])))
            path.append(len(segments) - 1)
        leaf[i] = path[-1] if path else -1
    parts = [tokens[each.source][each.begin : each.end] for each in segments]
    return _arranged(parts, [each.parent for each in segments], leaf, weights, multiple)


def neighbours(trajectories: Sequence[Any]) -> tuple[list[int], list[int]]:
    """An order in which trajectories that share a prefix lie next to each other.

    trajectories: as of `pack`. Returns their indices in that order, and how many tokens each shares
    with the one before it, 0 for the first: a run of neighbours has as many distinct prefixes as
    its first has tokens, and what each of the others does not share. Raises ValueError for tokens
    that are none.
    """
    return _neighbours(_of_trajectories(trajectories))


def from_segments(
    segments: Sequence[Any],
    parents: Sequence[int],
    *,
    ends: Sequence[int] | None = None,
    weights: Sequence[Any] | None = None,
    multiple: int = 1,
) -> PrefixTree:
    """A tree whose segments are known, such as turns of a branching rollout; nothing is merged.

    segments: token ids of each, possibly none. parents: of each segment the index of the one that
    it continues, which must come before it; -1 for none. ends: of each trajectory the segment with
    which it ends; default: every segment that no other continues. weights, multiple: as of `pack`.
    Raises ValueError for other numbers.
    """
    each_of = enumerate(_sequence("segments", segments))
    parts = [_tokens(f"segments[{i}]", each) for i, each in each_of]
    each_of = enumerate(_sequence("parents", parents))
    before = [integer(f"parents[{i}]", each) for i, each in each_of]
    if len(before) != len(parts):
        raise ValueError(f"parents: one per segment, got {len(before)} for {len(parts)} segments")
    for i, each in enumerate(before):
        if not -1 <= each < i:
            raise ValueError(
                f"parents[{i}] must be -1 or a segment before segment {i}, got {each}: segments "
                "come after those that they continue"
            )
    if ends is None:
        ends = sorted(set(range(len(parts))) - set(before))
    leaf = [integer(f"ends[{i}]", each) for i, each in enumerate(_sequence("ends", ends))]
    for i, each in enumerate(leaf):
        if not 0 <= each < len(parts):
            raise ValueError(f"ends[{i}] must be one of {len(parts)} segments, got {each}")
    return _arranged(parts, before, leaf, weights, multiple)


def _of_trajectories(trajectories: Sequence[Any]) -> list[np.ndarray]:
    each_of = enumerate(_sequence("trajectories", trajectories))
    return [_tokens(f"trajectories[{i}]", each) for i, each in each_of]


def _neighbours(tokens: list[np.ndarray]) -> tuple[list[int], list[int]]:
    # As bytes, most significant first, a prefix comes right before what begins with it.
    order = sorted(range(len(tokens)), key=lambda i: tokens[i].astype(">u8").tobytes())
    shared = [0, *(_common(tokens[a], tokens[b]) for a, b in pairwise(order))]
    return order, shared[: len(order)]


def _arranged(
    parts: list[np.ndarray],
    parent: list[int],
    leaf: list[int],
    weights: Sequence[Any] | None,
    multiple: int,
) -> PrefixTree:
    """The tree of segments `parts`; trajectory i ends with segment leaf[i], -1 for none."""
    multiple = integer("multiple", multiple)
    if not 1 <= multiple < 2**31:
        raise ValueError(f"multiple must be from 1 to {2**31 - 1}, got {multiple}")
    size = np.array([len(part) for part in parts], dtype=np.int64)
    rows = int(size.sum())
    if not rows:
        raise ValueError("trajectories: there is no token in any of them")
    lineage = _depth_first(parent, leaf)
    total = -(-rows // multiple) * multiple
    start, depth, last = (np.zeros(len(parts), dtype=np.int64) for _ in range(3))
    place = 0
    for each in lineage:
        above = parent[each]
        depth[each] = depth[above] + size[above] if above >= 0 else 0
        start[each], place = place, place + size[each]
        last[each] = place - 1 if size[each] else last[above] if above >= 0 else -1
    stop = start + size
    for each in reversed(lineage):  # a subtree ends where its last child's does
        if parent[each] >= 0:
            stop[parent[each]] = max(stop[parent[each]], stop[each])
    parents = np.full(total, -1)
    tokens, positions, out = np.zeros((3, total), dtype=np.int64)
    for each in (each for each in lineage if size[each]):
        a, b, above = start[each], start[each] + size[each], parent[each]
        tokens[a:b], out[a:b] = parts[each], stop[each]
        positions[a:b] = np.arange(depth[each], depth[each] + size[each])
        parents[a:b] = np.arange(a - 1, b - 1)
        parents[a] = last[above] if above >= 0 else -1
    paths = tuple(_path(each, parent, start, size) for each in leaf)
    order = np.array([i for i, path in enumerate(paths) if len(path)], dtype=np.int64)
    ends = np.array([paths[i][-1] for i in order], dtype=np.int64)
    by_end = np.argsort(ends, kind="stable")
    order, ends = order[by_end], ends[by_end]
    (target,) = np.nonzero(parents >= 0)
    edges = Edges(
        row=parents[target],
        label=tokens[target],
        target=target,
        weight=_weights(weights, paths, total)[target],
        first=np.searchsorted(ends, target),  # they end inside the subtree of the target
        stop=np.searchsorted(ends, out[target]),
    )
    return PrefixTree(tokens, positions, parents, out, edges, order, paths)


def _depth_first(parent: list[int], leaf: list[int]) -> list[int]:
    """All segments, each before those that continue it; of two that continue one, that of the
    earlier trajectory comes first.
    """
    children: list[list[int]] = [[] for _ in range(len(parent) + 1)]  # the last: roots
    seen = [False] * len(parent)
    for each in [*leaf, *range(len(parent))]:  # also segments that no trajectory ends with
        fresh = []
        while each >= 0 and not seen[each]:
            seen[each] = True
            fresh.append(each)
            each = parent[each]
        for segment in fresh:
            children[parent[segment]].append(segment)
    found, waiting = [], children[-1][::-1]
    while waiting:
        found.append(waiting.pop())
        waiting += children[found[-1]][::-1]
    return found


def _path(each: int, parent: list[int], start: np.ndarray, size: np.ndarray) -> np.ndarray:
    """int64: the rows from a root to the end of a segment."""
    segments = []
    while each >= 0:
        segments.append(each)
        each = parent[each]
    return counted(start[segments[::-1]], size[segments[::-1]])


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two trajectories share from the start."""
    shorter = min(len(a), len(b))
    different = a[:shorter] != b[:shorter]
    return int(different.argmax()) if different.any() else shorter


def _tokens(name: str, given: Any) -> np.ndarray:
    """Token ids as int64; ValueError, naming the argument `name`, for others."""
    try:
        found = np.asarray(given)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged, or on another device
        raise ValueError(f"{name} must hold token ids on the host, got {given!r}") from error
    if not found.size and found.ndim == 1:
        return np.empty(0, dtype=np.int64)
    if found.dtype.kind not in "iu" or found.ndim != 1:
        raise ValueError(
            f"{name} must hold token ids, integers in one dimension, got {found.dtype} of shape "
            f"{found.shape}"
        )
    wrong = found[(found < 0) | (found > LARGEST)]
    if len(wrong):
        raise ValueError(f"{name}: token ids are from 0 to {LARGEST}, got {wrong[0]}")
    return found.astype(np.int64)


def _weights(
    weights: Sequence[Any] | None, paths: tuple[np.ndarray, ...], total: int
) -> np.ndarray:
    """float64 [total]: the weights of all trajectories through a row."""
    given = [1.0] * len(paths) if weights is None else _sequence("weights", weights)
    if len(given) != len(paths):
        raise ValueError(f"weights: one per trajectory, got {len(given)} for {len(paths)}")
    found = np.zeros(total)
    for i, (path, weight) in enumerate(zip(paths, given, strict=True)):
        found[path] += _weight(f"weights[{i}]", weight, len(path))  # a path has no row twice
    return found


def _weight(name: str, given: Any, tokens: int) -> np.ndarray:
    """A number, or one per token, as float64; ValueError, naming the argument, for others."""
    try:
        found = np.asarray(given)
    except (TypeError, ValueError, RuntimeError):  # ragged, on another device, with a gradient
        found = np.array(None)
    number = found.dtype.kind in "biuf" and (found.ndim == 0 or found.shape == (tokens,))
    if not number or not np.isfinite(found).all():
        raise ValueError(
            f"{name} must be a finite number, or one per token of its trajectory ({tokens}), on "
            f"the host and without a gradient, got {_told(given)}"
        )
    return found.astype(np.float64)


def _sequence(name: str, given: Any) -> list[Any]:
    if isinstance(given, str) or not hasattr(given, "__iter__") or getattr(given, "shape", 1) == ():
        raise ValueError(f"{name} must be a sequence, got {_told(given)}")
    return list(given)


def _told(value: Any) -> str:
    """What arrived, in a few words."""
    shape = getattr(value, "shape", None)
    kind = type(value).__name__
    return f"{kind} {value!r:.60}" if shape is None else f"{kind} of shape {tuple(shape)}"

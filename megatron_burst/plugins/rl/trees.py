# SPDX-License-Identifier: Apache-2.0
"""Prefix trees: trajectories that share prefixes as one sequence with one copy of each prefix.

A trajectory is a list of tokens, such as a prompt with one sampled answer. `pack` merges common
prefixes into a tree of segments (runs of tokens without a branch) and orders its rows depth first.
`masks.Tree` then describes the visible rows by one bound per row.

An *edge* is the prediction of a row's token from the previous row on its path. Every row has one
edge, except padding and the first row of a root. Results per edge (log-probabilities, entropies)
are valid for all trajectories that pass through the edge. This module does not import torch.
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


LARGEST = 2**31 - 1  # largest token id


class Edges(NamedTuple):
    """Predictions of a tree as parallel arrays: one entry per predicted row, in the order of rows.

    Attributes:
        row: Row whose hidden state predicts the token, int64 [E]. A row before a branch occurs once
            per child.
        label: Predicted token, int64 [E].
        target: Row of the predicted token, int64 [E].
        weight: Sum of the weights of the trajectories through the edge, float64 [E].
        first: Index in `PrefixTree.order` of the first trajectory through the edge, int64 [E].
        stop: Index in `PrefixTree.order` after the last trajectory through the edge, int64 [E].
    """

    row: np.ndarray
    label: np.ndarray
    target: np.ndarray
    weight: np.ndarray
    first: np.ndarray
    stop: np.ndarray

    def on(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the edges (predictions) from the rows of a shard, and these rows.

        Args:
            positions: Positions of the shard, int64 [rows] (`Layout.positions`).

        Returns:
            The indices of the edges, ascending; and for each edge, the index in `positions` of the
            row from which the prediction is made. Both are int64.
        """
        positions = np.asarray(positions)
        if not len(positions):
            return np.empty((2, 0), dtype=np.int64)[0], np.empty(0, dtype=np.int64)
        order = np.argsort(positions, kind="stable")
        place = np.searchsorted(positions, self.row, sorter=order)
        local = order[np.minimum(place, len(order) - 1)]
        edges = np.flatnonzero(positions[local] == self.row)
        return edges, local[edges]


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """Trajectories as one sequence of S rows in depth-first order, made by `pack`.

    Attributes:
        tokens: Token of each row, int64 [S]; 0 in rows of padding.
        positions: Index of each row on the path from its root, int64 [S], for positional
            embeddings.
        parents: Previous row on the path, int64 [S]; -1 for the first row of a root and padding.
        out: First row after the subtree of each row, int64 [S], for `masks.Tree`; 0 for padding,
            which is at the end.
        edges: Predictions of the tree.
        order: Indices of the trajectories that have tokens, int64, ordered by their last rows.
        paths: Rows of each trajectory, int64 [tokens].
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
        """Mask of the tree: each row sees itself and its ancestors."""
        return Tree(self.out)

    @property
    def rows(self) -> int:
        """Number of rows without padding."""
        return int(np.count_nonzero(self.out))

    @property
    def trajectory_tokens(self) -> int:
        """Number of tokens of all trajectories before merging."""
        return sum(map(len, self.paths))

    @property
    def multiplicity(self) -> np.ndarray:
        """Number of trajectories that pass through each row, int64 [S]; 0 for padding."""
        rows = np.concatenate([*self.paths, np.empty(0, dtype=np.int64)])
        return np.bincount(rows, minlength=len(self.tokens))

    def describe(self) -> str:
        """Return a one-line report of the rows and attention pairs that merging saves."""
        before, pairs = self.trajectory_tokens, sum(len(x) * (len(x) + 1) // 2 for x in self.paths)
        return (
            f"{len(self.paths)} trajectories with {before:,} tokens in total become "
            f"{self.rows:,} rows ({before / max(self.rows, 1):.2f} x fewer), "
            f"{pairs / max(self.mask.pairs, 1):.2f} x fewer pairs in attention, depth up to "
            f"{int(self.positions.max()) + 1:,}"
        )

    def unpack(self, values: Any) -> list[Any]:
        """Expand values per edge or per row to one array per trajectory.

        Gradients of shared rows add up.

        Args:
            values: Numpy array or tensor [E, ...] or [S, ...].

        Returns:
            An array or tensor per trajectory of n tokens. For values per edge, its shape is [n - 1,
            ...] (0 entries if n is 0), and entry i belongs to the prediction of token i + 1. For
            values per row, its shape is [n, ...].

        Raises:
            ValueError: The length of `values` is neither E nor S.
        """
        size = values.shape[0] if getattr(values, "shape", ()) else None
        if size == len(self.tokens):
            return [values[path] for path in self.paths]
        if size == len(self.edges.row):
            return [values[self._edge[path[1:]]] for path in self.paths]
        raise ValueError(
            "values must be an array or tensor with one value per edge "
            f"({len(self.edges.row)}) or per row ({len(self.tokens)}), got {_described(values)}"
        )

    @cached_property
    def _edge(self) -> np.ndarray:
        """Index of the edge that predicts each row, int64 [S]; -1 for rows without such an edge."""
        edge = np.full(len(self.tokens), -1)
        edge[self.edges.target] = np.arange(len(self.edges.target))
        return edge

    def edges_on(self, layout: Layout, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the edges (predictions) from the rows of a rank's shard; see `Edges.on`.

        Args:
            layout: Layout of the tree.
            rank: Rank that holds the shard.
        """
        return self.edges.on(layout.positions(rank, len(self.tokens)))


class _TreeSegment(NamedTuple):
    """Tokens of one segment of a tree.

    Attributes:
        parent: Index of the parent segment; -1 for a root.
        source: Trajectory that contains the tokens.
        begin: Index of the first token in the trajectory.
        end: Index after the last token.
    """

    parent: int
    source: int
    begin: int
    end: int


def pack(
    trajectories: Sequence[Any], *, weights: Sequence[Any] | None = None, multiple: int = 1
) -> PrefixTree:
    """Merge the common prefixes of trajectories into a tree.

    Args:
        trajectories: Sequences of token ids from 0 on (lists, numpy arrays, host tensors), in any
            order and of any length, including 0. Equal trajectories share all rows. Trajectories
            with different first tokens are separate trees in one pack.
        weights: One weight per trajectory, a number or one number per token; the weight of the
            first token is ignored. Default 1.
        multiple: The number of rows is padded to a multiple of this number, as layouts require.
            Padding is at the end.

    Returns:
        The tree.

    Raises:
        ValueError: A token or a weight is invalid, or there is no token at all.
    """
    tokens = _of_trajectories(trajectories)
    segments: list[_TreeSegment] = []
    leaf = [-1] * len(tokens)
    path: list[int] = []  # segments of the previous trajectory
    for i, shared in zip(*_neighbours(tokens), strict=True):
        while path and segments[path[-1]].begin >= shared:
            path.pop()
        if path and segments[path[-1]].end > shared:  # the branch is inside a segment: split it
            low = segments[path[-1]]
            segments.append(low._replace(end=shared))
            segments[path[-1]] = low._replace(begin=shared, parent=len(segments) - 1)
            path[-1] = len(segments) - 1
        if len(tokens[i]) > shared:
            segments.append(_TreeSegment(path[-1] if path else -1, i, shared, len(tokens[i])))
            path.append(len(segments) - 1)
        leaf[i] = path[-1] if path else -1
    parts = [tokens[segment.source][segment.begin : segment.end] for segment in segments]
    return _arranged(parts, [segment.parent for segment in segments], leaf, weights, multiple)


def neighbours(trajectories: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Return an order in which trajectories with a shared prefix are neighbours.

    In this order, the merged tree of consecutive trajectories has one row per token of the first
    trajectory. It has one further row per token that a later trajectory does not share with the
    trajectory before it.

    Args:
        trajectories: Same as in `pack`.

    Returns:
        The indices of the trajectories in this order; and for each trajectory, the length of the
        prefix that it shares with the trajectory before it (0 for the first).

    Raises:
        ValueError: A token is invalid.
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
    """Build a tree from segments, such as turns of a branching rollout, without merging.

    Args:
        segments: Token ids of each segment; a segment may be empty.
        parents: For each segment, the index of the segment that it continues; -1 for a root. A
            segment must come after the segment that it continues.
        ends: Last segment of each trajectory. Default: every segment that no other segment
            continues.
        weights: Same as in `pack`.
        multiple: Same as in `pack`.

    Raises:
        ValueError: An argument is invalid.
    """
    numbered = enumerate(_sequence("segments", segments))
    parts = [_tokens(f"segments[{i}]", segment) for i, segment in numbered]
    numbered = enumerate(_sequence("parents", parents))
    before = [integer(f"parents[{i}]", parent) for i, parent in numbered]
    if len(before) != len(parts):
        raise ValueError(
            f"parents has {len(before)} entries for {len(parts)} segments; pass one per segment"
        )
    for i, parent in enumerate(before):
        if not -1 <= parent < i:
            raise ValueError(
                f"parents[{i}] must be -1 or a segment before segment {i}, got {parent}: order "
                "segments so that each comes after the segment that it continues"
            )
    if ends is None:
        ends = sorted(set(range(len(parts))) - set(before))
    leaf = [integer(f"ends[{i}]", end) for i, end in enumerate(_sequence("ends", ends))]
    for i, end in enumerate(leaf):
        if not 0 <= end < len(parts):
            raise ValueError(
                f"ends[{i}] must be the index of one of {len(parts)} segments, got {end}"
            )
    return _arranged(parts, before, leaf, weights, multiple)


def _of_trajectories(trajectories: Sequence[Any]) -> list[np.ndarray]:
    numbered = enumerate(_sequence("trajectories", trajectories))
    return [_tokens(f"trajectories[{i}]", trajectory) for i, trajectory in numbered]


def _neighbours(tokens: list[np.ndarray]) -> tuple[list[int], list[int]]:
    # In the order of big-endian bytes, a prefix directly precedes the trajectories that start with
    # it.
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
    """Build the tree of the segments `parts`.

    Args:
        parts: Token ids of each segment.
        parent: Index of the segment before each segment; -1 for a root.
        leaf: Last segment of each trajectory; -1 for a trajectory without tokens.
        weights: Same as in `pack`.
        multiple: Same as in `pack`.
    """
    multiple = integer("multiple", multiple)
    if not 1 <= multiple < 2**31:
        raise ValueError(f"multiple must be from 1 to {2**31 - 1}, got {multiple}")
    size = np.array([len(part) for part in parts], dtype=np.int64)
    rows = int(size.sum())
    if not rows:
        raise ValueError("trajectories contain no tokens; pass at least one token")
    lineage = _depth_first(parent, leaf)
    total = -(-rows // multiple) * multiple
    start, depth, last = (np.zeros(len(parts), dtype=np.int64) for _ in range(3))
    place = 0
    for segment in lineage:
        above = parent[segment]
        depth[segment] = depth[above] + size[above] if above >= 0 else 0
        start[segment], place = place, place + size[segment]
        last[segment] = place - 1 if size[segment] else last[above] if above >= 0 else -1
    stop = start + size
    for segment in reversed(lineage):  # a subtree ends with the subtree of its last child
        if parent[segment] >= 0:
            stop[parent[segment]] = max(stop[parent[segment]], stop[segment])
    parents = np.full(total, -1)
    tokens, positions, out = np.zeros((3, total), dtype=np.int64)
    for segment in (segment for segment in lineage if size[segment]):
        a, b, above = start[segment], start[segment] + size[segment], parent[segment]
        tokens[a:b], out[a:b] = parts[segment], stop[segment]
        positions[a:b] = np.arange(depth[segment], depth[segment] + size[segment])
        parents[a:b] = np.arange(a - 1, b - 1)
        parents[a] = last[above] if above >= 0 else -1
    paths = tuple(_path(segment, parent, start, size) for segment in leaf)
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
        first=np.searchsorted(
            ends, target
        ),  # these trajectories end inside the subtree of the target
        stop=np.searchsorted(ends, out[target]),
    )
    return PrefixTree(tokens, positions, parents, out, edges, order, paths)


def _depth_first(parent: list[int], leaf: list[int]) -> list[int]:
    """Return the indices of all segments in depth-first order.

    Children of one segment are ordered by their first trajectory.

    Args:
        parent: Index of the segment before each segment; -1 for a root.
        leaf: Last segment of each trajectory; -1 for a trajectory without tokens.
    """
    children: list[list[int]] = [[] for _ in range(len(parent) + 1)]  # the last entry: roots
    seen = [False] * len(parent)
    for segment in [*leaf, *range(len(parent))]:  # includes segments at which no trajectory ends
        fresh = []
        while segment >= 0 and not seen[segment]:
            seen[segment] = True
            fresh.append(segment)
            segment = parent[segment]
        for new in fresh:
            children[parent[new]].append(new)
    order, waiting = [], children[-1][::-1]
    while waiting:
        order.append(waiting.pop())
        waiting += children[order[-1]][::-1]
    return order


def _path(segment: int, parent: list[int], start: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Return the rows of the path from a root to the end of a segment, int64."""
    segments = []
    while segment >= 0:
        segments.append(segment)
        segment = parent[segment]
    return counted(start[segments[::-1]], size[segments[::-1]])


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the common prefix of two trajectories."""
    shorter = min(len(a), len(b))
    different = a[:shorter] != b[:shorter]
    return int(different.argmax()) if different.any() else shorter


def _tokens(name: str, argument: Any) -> np.ndarray:
    """Return token ids as int64 [tokens].

    Raises:
        ValueError: The ids are invalid; the message names the argument.
    """
    try:
        ids = np.asarray(argument)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged, or on another device
        raise ValueError(f"{name} must hold token ids on the host, got {argument!r}") from error
    if not ids.size and ids.ndim == 1:
        return np.empty(0, dtype=np.int64)
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        raise ValueError(
            f"{name} must hold token ids, integers in one dimension, got {ids.dtype} of shape "
            f"{ids.shape}"
        )
    wrong = ids[(ids < 0) | (ids > LARGEST)]
    if len(wrong):
        raise ValueError(f"{name}: token ids are from 0 to {LARGEST}, got {wrong[0]}")
    return ids.astype(np.int64)


def _weights(
    weights: Sequence[Any] | None, paths: tuple[np.ndarray, ...], total: int
) -> np.ndarray:
    """Return the sum of the weights of the trajectories through each row, float64 [total]."""
    checked = [1.0] * len(paths) if weights is None else _sequence("weights", weights)
    if len(checked) != len(paths):
        raise ValueError(
            f"weights has {len(checked)} entries for {len(paths)} trajectories; pass one per "
            "trajectory"
        )
    sums = np.zeros(total)
    for i, (path, weight) in enumerate(zip(paths, checked, strict=True)):
        sums[path] += _weight(f"weights[{i}]", weight, len(path))  # a path has no row twice
    return sums


def _weight(name: str, argument: Any, tokens: int) -> np.ndarray:
    """Return the weight of a trajectory, or of each of its tokens, as float64.

    Raises:
        ValueError: The weight is invalid; the message names the argument.
    """
    try:
        numbers = np.asarray(argument)
    except (TypeError, ValueError, RuntimeError):  # ragged, on another device, with a gradient
        numbers = np.array(None)
    number = numbers.dtype.kind in "biuf" and (numbers.ndim == 0 or numbers.shape == (tokens,))
    if not number or not np.isfinite(numbers).all():
        raise ValueError(
            f"{name} must be a finite number, or one per token of its trajectory ({tokens}), on "
            f"the host and without a gradient, got {_described(argument)}"
        )
    return numbers.astype(np.float64)


def _sequence(name: str, argument: Any) -> list[Any]:
    if (
        isinstance(argument, str)
        or not hasattr(argument, "__iter__")
        or getattr(argument, "shape", 1) == ()
    ):
        raise ValueError(f"{name} must be a sequence, got {_described(argument)}")
    return list(argument)


def _described(value: Any) -> str:
    """Return a short description of a value for messages."""
    shape = getattr(value, "shape", None)
    kind = type(value).__name__
    return f"{kind} {value!r:.60}" if shape is None else f"{kind} of shape {tuple(shape)}"

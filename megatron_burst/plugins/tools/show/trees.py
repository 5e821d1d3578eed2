# SPDX-License-Identifier: Apache-2.0
"""A prefix tree cut over ranks as a scene: its segments, who holds their rows, what each rank
computes, and which keys and values nodes receive.

This module holds its flags. Shape letters: S rows of the tree, with padding.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .... import registry
from ....schedule.tables import Grid
from .. import call_flags
from . import inputs
from .scene import Shards, runs_of

ROWS = 1 << 20  # of a tree, of which only runs are drawn
SEGMENTS = 512  # of the largest tree that can be read
SAMPLED = 512  # rows and columns of the mask; of larger ones every n-th
BYTES = 2  # of a number in bf16


class TreeBar(NamedTuple):
    """Rows begin..stop (exclusive) without a branch. depth: of its first row on the path; parent:
    index of the segment it continues, -1 for none; lane: its place across the path, leaf by
    leaf.
    """

    begin: int
    stop: int
    depth: int
    parent: int
    lane: float


@dataclass(frozen=True)
class TreeScene:
    """A tree on ranks. key_heads, width: of the keys and values that travel."""

    tree: Any  # a `mb.trees.PrefixTree`, of another plugin
    shards: Shards
    grid: Grid
    key_heads: int
    width: int

    @cached_property
    def segments(self) -> list[TreeBar]:
        """In the order of rows, without padding."""
        tree, first = self.tree, self.tree.mask.bounds
        begins = [a for a in first[:-1].tolist() if tree.out[a]]
        above = np.searchsorted(begins, tree.parents[begins], side="right") - 1
        lanes, leaves = [0.0] * len(begins), 0
        children: list[list[int]] = [[] for _ in begins]
        for i in reversed(range(len(begins))):  # children come after their parent
            if children[i]:
                lanes[i] = (lanes[children[i][0]] + lanes[children[i][-1]]) / 2
            else:
                lanes[i], leaves = float(leaves), leaves + 1
            if above[i] >= 0:
                children[above[i]].append(i)
        stops = [*begins[1:], tree.rows]
        return [
            TreeBar(a, b, int(tree.positions[a]), int(parent), leaves - 1 - lane)
            for a, b, parent, lane in zip(begins, stops, above, lanes, strict=True)
        ]

    @property
    def lanes(self) -> int:
        """How many segments no other continues."""
        return len(self.segments) - len({each.parent for each in self.segments} - {-1})

    @property
    def depth(self) -> int:
        """Rows of the longest path."""
        return int(self.tree.positions.max()) + 1

    def runs(self, segment: TreeBar) -> list[tuple[int, int, int]]:
        """(first place on the path, the one after the last, rank) of the parts of a segment."""
        found = runs_of(self.shards.holders[segment.begin : segment.stop])
        return [(segment.depth + a, segment.depth + b, rank) for a, b, rank in found]

    @cached_property
    def rows(self) -> list[int]:
        """How many rows each rank has, without padding."""
        real = self.tree.out > 0
        return np.bincount(self.shards.holders[real], minlength=self.grid.size).tolist()

    @cached_property
    def work(self) -> list[int]:
        """Visible pairs of each rank's queries."""
        return self.shards.work

    @property
    def imbalance(self) -> float:
        return self.shards.spread

    def received(self, ranks: int) -> int:
        """Bytes of keys and values that groups of so many ranks need from others, each row once
        for a group.
        """
        groups, rows = self.shards.holders // ranks, 0
        real = self.tree.out > 0
        for group in range(self.grid.size // ranks):
            own = groups == group
            before = np.concatenate([[0], np.cumsum(own & real)])
            # Row k is seen by the queries k to out[k], that one excluded.
            seen = real & (before[self.tree.out] > before[:-1]) & ~own
            rows += int(seen.sum())
        return rows * 2 * self.key_heads * self.width * BYTES

    def sampled(self, most: int) -> tuple[np.ndarray, int]:
        """int64: the rank that computes each visible pair, else -1, of every n-th row with at most
        `most` of them; and n.
        """
        step = -(-self.shards.seq_len // most)
        rows = np.arange(0, self.shards.seq_len, step)
        seen = self.shards.mask.visible(rows[:, None], rows[None, :])
        return np.where(seen, self.shards.holders[rows][:, None], -1), step


def add_flags(sub: argparse.ArgumentParser) -> None:
    """Those that only a tree has."""
    sub.add_argument(
        "--trajectories", required=True, type=Path, metavar="FILE",
        help="a file with a JSON list of token ids per line, such as [11, 12, 13]",
    )  # fmt: skip
    inputs.add_layout(sub, "balanced")
    call_flags.add_heads(sub, width=128, queries=False)


def tree_scene(arguments: argparse.Namespace, grid: Grid) -> TreeScene:
    """Make the scene of these flags. Raises ValueError for flags that do not fit together."""
    path = arguments.trajectories
    # Zigzag cuts two pieces per rank.
    each = grid.size if arguments.layout == "balanced" else 2 * grid.size
    trees = registry.required("trees", "show trees")
    try:
        tree = trees.pack(_read(path), multiple=each)
    except ValueError as error:
        raise ValueError(f"--trajectories {path}: {error}") from error
    rows = len(tree.tokens)
    if rows > ROWS:
        raise ValueError(f"--trajectories: trees of at most {ROWS} rows are drawn, got {rows}")
    layout, text = inputs.layout_of(arguments, arguments.layout, grid, tree=tree.mask)
    layout.check(rows)
    shards = Shards(tree.mask, layout, rows, "tree", text)
    scene = TreeScene(tree, shards, grid, arguments.kv_heads, arguments.width)
    if len(scene.segments) > SEGMENTS:
        raise ValueError(
            f"--trajectories: a picture shows at most {SEGMENTS} segments, got "
            f"{len(scene.segments)}; take fewer trajectories"
        )
    return scene


def _read(path: Path) -> list[Any]:
    """Read the trajectories of a file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            tokens = json.loads(line)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
        if not isinstance(tokens, list):
            raise ValueError(
                f"line {number}: a line is a list of token ids, such as [11, 12, 13], got "
                f"{line.strip():.40}"
            )
        found.append(tokens)
    return found

# SPDX-License-Identifier: Apache-2.0
"""Content of pictures of prefix trees: segments, and rows, work and received bytes of each rank.

A prefix tree contains several trajectories, whose common prefixes are computed only once. This
module also defines the flags of `show tree`.
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

ROWS = 1 << 20  # maximum rows of a tree; only ranges of rows are drawn
SEGMENTS = 512  # maximum number of segments, so that the picture is readable
SAMPLED = 512  # maximum rows and columns of the drawn mask; larger masks are sampled
BYTES = 2  # bytes of a bf16 number


class TreeBar(NamedTuple):
    """Segment of a tree: consecutive rows without a branch.

    Attributes:
        begin: First row.
        stop: Row after the last row.
        depth: Position of the first row in its trajectory.
        parent: Index of the parent segment; -1 for a root.
        lane: y coordinate of the segment. Segments without children are 1 apart; other segments are
            centred between their children.
    """

    begin: int
    stop: int
    depth: int
    parent: int
    lane: float


@dataclass(frozen=True)
class TreeScene:
    """Content of a picture of a prefix tree that is divided among ranks.

    Attributes:
        tree: The tree.
        shards: The tree's rows as a sequence, with mask and layout.
        grid: Number of nodes and of ranks per node.
        key_heads: Number of key/value heads.
        width: Width of a head.
    """

    tree: Any  # a `mb.trees.PrefixTree`, from another plugin
    shards: Shards
    grid: Grid
    key_heads: int
    width: int

    @cached_property
    def segments(self) -> list[TreeBar]:
        """Segments of the tree in the order of rows, without padding."""
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
        """Number of lanes of the picture: one per segment without children."""
        return len(self.segments) - len({segment.parent for segment in self.segments} - {-1})

    @property
    def depth(self) -> int:
        """Number of tokens of the longest trajectory."""
        return int(self.tree.positions.max()) + 1

    def runs(self, segment: TreeBar) -> list[tuple[int, int, int]]:
        """Split a segment into ranges of rows that are on one rank.

        Returns:
            (first, stop, rank) of each range; first and stop are positions in the trajectory.
        """
        runs = runs_of(self.shards.holders[segment.begin : segment.stop])
        return [(segment.depth + a, segment.depth + b, rank) for a, b, rank in runs]

    @cached_property
    def rows(self) -> list[int]:
        """Number of rows of each rank, without padding."""
        real = self.tree.out > 0
        return np.bincount(self.shards.holders[real], minlength=self.grid.size).tolist()

    @cached_property
    def work(self) -> list[int]:
        """Number of visible pairs of each rank's queries with all keys."""
        return self.shards.work

    @property
    def imbalance(self) -> float:
        return self.shards.spread

    def received(self, ranks: int) -> int:
        """Return the bytes of keys and values that groups of ranks receive, summed over all groups.

        Args:
            ranks: Ranks per group, for example the ranks of a node. A row counts once for each
                group that needs it and does not hold it.
        """
        groups, rows = self.shards.holders // ranks, 0
        real = self.tree.out > 0
        for group in range(self.grid.size // ranks):
            own = groups == group
            before = np.concatenate([[0], np.cumsum(own & real)])
            # Key k is visible to queries k to out[k] (exclusive).
            seen = real & (before[self.tree.out] > before[:-1]) & ~own
            rows += int(seen.sum())
        return rows * 2 * self.key_heads * self.width * BYTES

    def sampled(self, most: int) -> tuple[np.ndarray, int]:
        """Return a sample of the mask: every n-th row and column, with n as small as possible.

        Args:
            most: Maximum number of rows of the sample.

        Returns:
            The rank that computes each pair, -1 for invisible pairs, int64 [rows, rows]; and n.
        """
        step = -(-self.shards.seq_len // most)
        rows = np.arange(0, self.shards.seq_len, step)
        seen = self.shards.mask.visible(rows[:, None], rows[None, :])
        return np.where(seen, self.shards.holders[rows][:, None], -1), step


def add_flags(sub: argparse.ArgumentParser) -> None:
    """Add the flags of `show tree`."""
    sub.add_argument(
        "--trajectories", required=True, type=Path, metavar="FILE",
        help="file with one JSON list of token ids per line, such as [11, 12, 13]",
    )  # fmt: skip
    inputs.add_layout(sub, "balanced")
    call_flags.add_heads(sub, width=128, queries=False)


def tree_scene(arguments: argparse.Namespace, grid: Grid) -> TreeScene:
    """Return the scene that the flags describe.

    Raises:
        ValueError: The file is invalid, or flags are inconsistent.
    """
    path = arguments.trajectories
    # Layout zigzag requires two pieces per rank.
    multiple = grid.size if arguments.layout == "balanced" else 2 * grid.size
    trees = registry.required("trees", "show trees")
    try:
        tree = trees.pack(_read(path), multiple=multiple)
    except ValueError as error:
        raise ValueError(f"--trajectories {path}: {error}") from error
    rows = len(tree.tokens)
    if rows > ROWS:
        raise ValueError(
            f"--trajectories: a picture shows at most {ROWS} rows, got {rows}; use fewer "
            "trajectories"
        )
    layout, text = inputs.layout_of(arguments, arguments.layout, grid, tree=tree.mask)
    layout.check(rows)
    shards = Shards(tree.mask, layout, rows, "tree", text)
    scene = TreeScene(tree, shards, grid, arguments.kv_heads, arguments.width)
    if len(scene.segments) > SEGMENTS:
        raise ValueError(
            f"--trajectories: a picture shows at most {SEGMENTS} segments, got "
            f"{len(scene.segments)}; use fewer trajectories"
        )
    return scene


def _read(path: Path) -> list[Any]:
    """Read trajectories from a file that has one JSON list of token ids per line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from error
    trajectories = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            tokens = json.loads(line)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
        if not isinstance(tokens, list):
            raise ValueError(
                f"line {number}: a line must be a list of token ids, such as [11, 12, 13], got "
                f"{line.strip():.40}"
            )
        trajectories.append(tokens)
    return trajectories

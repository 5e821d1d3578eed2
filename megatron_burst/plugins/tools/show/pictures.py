# SPDX-License-Identifier: Apache-2.0
"""Pictures of masks, layouts, state scans and prefix trees; `timeline` draws schedules."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .. import lanes
from ..lanes import box
from . import timeline, words
from .colours import GREY, INK, PAPER, RULE, WARN, channels, mixed, of_rank
from .scans import ScanScene
from .scene import LayoutScene, MaskScene, ScheduleScene, runs_of
from .trees import SAMPLED, TreeScene


def draw(scene: words.Scene, path: Path) -> None:
    """Draw the picture of a scene and write it to a file."""
    with lanes.styled():
        lanes.save(DRAWERS[type(scene)](scene), path)


def _headed(width: float, height: float, scene: words.Scene, numbers: bool = True) -> Figure:
    """Return a figure that has only the title and the subtitle of a scene.

    Args:
        width: Width in inches.
        height: Height in inches.
        scene: The scene.
        numbers: True adds the caption, which has numbers of transfers, bytes and work.
    """
    caption = words.caption(scene) if numbers else []
    return lanes.headed(width, height, words.title(scene), words.subtitle(scene), caption)


# --- the score matrix ----------------------------------------------------------------------

SIDE = 3.9  # side of a matrix in inches


def _mask(scene: MaskScene) -> Figure:
    shards = scene.shards
    figure = _headed(11.1, 5.8, scene)
    bottom = 0.8
    ordered = box(figure, 0.62, bottom, SIDE, SIDE)
    sharded = box(figure, 5.15, bottom, SIDE, SIDE)
    _matrix(ordered, scene.computers, shards.size)
    ordered.set_title("global order", loc="left", fontsize=10, color=INK)
    ordered.set_ylabel("query position", labelpad=2)
    ordered.set_xlabel("key position", labelpad=2)
    ends = [0, shards.seq_len - 1]
    for axis in (ordered.xaxis, ordered.yaxis):
        axis.set_ticks(ends, [str(end) for end in ends])
    _matrix(sharded, scene.computers[np.ix_(shards.order, shards.order)], shards.size)
    sharded.set_title("shard order, and the step of each pair of shards", loc="left", fontsize=10)
    _blocks(sharded, scene)
    _work_of_mask(box(figure, 9.2, bottom, 1.45, SIDE), scene)
    return figure


def _matrix(axes: Axes, computers: np.ndarray, ranks: int) -> None:
    colours = np.array(
        [channels(of_rank(rank, ranks)) for rank in range(ranks)] + [channels(PAPER)]
    )
    picture = colours[computers].astype(np.uint8)  # -1 (not visible) selects the last colour
    size = len(computers)
    axes.imshow(picture, interpolation="nearest", extent=(0, size, size, 0))
    if size <= 64:  # grid lines would cover the positions of a larger matrix
        for rules in (axes.hlines, axes.vlines):
            rules(np.arange(1, size), 0, size, colors="white", linewidth=0.35)
    axes.tick_params(length=0, pad=3)


def _blocks(axes: Axes, scene: MaskScene) -> None:
    """Draw lines between shards, and write the step in which each pair of shards is computed."""
    shards, edges = scene.shards, scene.shards.edges
    middles, names = (edges[:-1] + edges[1:]) / 2, [str(rank) for rank in range(shards.size)]
    for rules, ticks in ((axes.hlines, axes.set_xticks), (axes.vlines, axes.set_yticks)):
        rules(edges, 0, shards.seq_len, colors=INK, linewidth=0.7, clip_on=False)
        ticks(middles, names, fontsize=min(9, 100 / shards.size))
    for i, j in np.ndindex(scene.steps.shape):
        if scene.steps[i, j] >= 0 and shards.size <= 16:
            _step(axes, scene, (i, j))
    axes.set_xlabel("rank that holds the keys", labelpad=2)
    axes.set_ylabel("rank that holds the queries", labelpad=2)


def _step(axes: Axes, scene: MaskScene, pair: tuple[int, int]) -> None:
    """Write the step of a pair of shards into the quarter of its block with the fewest pairs."""
    order, edges = scene.shards.order, scene.shards.edges
    rows, columns = (order[edges[i] : edges[i + 1]] for i in pair)
    seen = scene.computers[np.ix_(rows, columns)] >= 0
    halves = [(slice(None, len(rows) // 2), 0.25), (slice(len(rows) // 2, None), 0.75)]
    quarters = [(seen[r, c].sum(), y, x) for r, y in halves for c, x in reversed(halves)]
    hidden, y, x = min(quarters, key=lambda quarter: quarter[0])
    frame = {"boxstyle": "circle,pad=0.12", "facecolor": "white", "edgecolor": "none"}
    axes.text(
        edges[pair[1]] + x * len(columns), edges[pair[0]] + y * len(rows),
        str(scene.steps[pair]), ha="center", va="center_baseline",
        fontsize=min(9.0, 60 / scene.shards.size), bbox=frame | {"alpha": 0.85} if hidden else None,
    )  # fmt: skip


def _work_of_mask(axes: Axes, scene: MaskScene) -> None:
    """Draw the work of each rank as a bar beside the rows of the matrix that the rank holds."""
    shards, work, edges = scene.shards, scene.shards.work, scene.shards.edges
    middles, mean = ((edges[:-1] + edges[1:]) / 2).tolist(), sum(work) / len(work)
    axes.set_title("work", loc="left", fontsize=10)
    colours = [of_rank(rank, shards.size) for rank in range(shards.size)]
    lanes.work_bars(axes, middles, work, colours, 0.62 * float(edges[1]), max(work))
    axes.set_ylim(shards.seq_len, 0)
    axes.set_xticks([mean], [f"mean {mean:,.0f}"])
    axes.set_yticks([])
    axes.tick_params(length=0, pad=3)
    axes.spines[["top", "right", "bottom"]].set_visible(False)


# --- layouts -------------------------------------------------------------------------------

STRIP, PITCH = 0.42, 0.86  # height of a strip and distance of strips, in inches


def _layouts(scene: LayoutScene) -> Figure:
    with_work = bool(scene.rows[0].mask_text)
    wide, most = 8.2, max(max(shards.work) for shards in scene.rows)
    height = 0.95 + PITCH * len(scene.rows)
    figure = _headed(wide + (2.7 if with_work else 0.6), height, scene, numbers=False)
    for row, shards in enumerate(scene.rows):
        bottom = height - 0.8 - PITCH * (row + 1) + 0.18
        axes = box(figure, 0.3, bottom, wide, STRIP)
        axes.set_title(shards.layout_text, loc="left", fontsize=10, pad=4)
        _strip(axes, shards.holders, shards.size)
        if with_work:
            axes = box(figure, wide + 0.65, bottom, 1.75, STRIP)
            best = " (least)" if shards.layout_text == scene.best else ""
            title = f"imbalance {shards.spread:.2f}{best}"
            axes.set_title(title, loc="left", fontsize=10, pad=4)
            _columns(axes, shards.work, most)
    return figure


def _strip(axes: Axes, holders: np.ndarray, ranks: int) -> None:
    """Draw the sequence as a strip, with one bar for each range of positions on one rank."""
    count, runs = len(holders), runs_of(holders)
    owners = [rank for *_, rank in runs]
    lanes.bars(axes, 0, 1, [run[:2] for run in runs], [of_rank(rank, ranks) for rank in owners],
               list(map(str, owners)), least=count / 80,
               width=0.6 if len(runs) <= 256 else 0)  # fmt: skip
    axes.set_xlim(0, count)
    axes.set_ylim(0, 1)
    axes.set_axis_off()


def _columns(axes: Axes, work: list[int], most: int) -> None:
    """Draw the work of each rank as a column, and the mean as a dashed line.

    Args:
        axes: Axes to draw on.
        work: Work of each rank.
        most: Maximum work, which sets the height of the y axis.
    """
    ranks = len(work)
    axes.bar(range(ranks), work, width=0.78, color=[of_rank(rank, ranks) for rank in range(ranks)])
    axes.axhline(sum(work) / ranks, **(lanes.MEAN | {"linewidth": 0.8}))
    axes.axhline(0, color=mixed(GREY, "#ffffff", 0.4), linewidth=0.8)
    axes.set_ylim(0, max(most, 1) * 1.03)
    axes.set_axis_off()


# --- scans of states -----------------------------------------------------------------------

ROW, GAP = 0.34, 0.5  # height of a rank in inches; gap between nodes in rows
# Widths in inches: of rank names, of a round with few hops, of a round with many hops.
LEFT, NARROW, BROAD = 0.75, 1.15, 1.9
CHAIN = 0.5  # height of the chain in inches
LABELS = 8  # maximum hops of a round for which labels are drawn
MOST = 9.5  # target width of all rounds in inches; readable rounds may need more


def _scan(scene: ScanScene) -> Figure:
    """Draw the pieces of all documents as a strip, and below it one column per round of transfers.

    A piece is a run of consecutive positions of a document on one rank. Arrows lead from the sender
    at the left of a column to the receiver at the right.
    """
    rounds, ranks = max(1, scene.rounds), scene.grid.size
    busiest = max([int((scene.hops.round == n).sum()) for n in range(rounds)], default=0)
    column = min(BROAD if busiest > 6 else NARROW, max(0.55, MOST / rounds))
    tall = ROW * (_middle(scene, ranks - 1) + 1)
    width = max(6.4, LEFT + rounds * column + 0.3)
    height = 0.85 + CHAIN + 0.55 + tall + 0.3 + 0.19 * (len(scene.counts()) + 1)
    figure = _headed(width, height, scene)
    top = height - 0.85 - CHAIN
    _chain(box(figure, LEFT, top, width - LEFT - 0.3, CHAIN), scene)
    axes = box(figure, LEFT, top - 0.5 - tall, rounds * column, tall)
    _ranks(axes, scene, rounds, column)
    for hop in range(len(scene.hops)):
        _hop(axes, scene, hop, column)
    for number in range(scene.rounds):
        name = f"round {number}" if column > 0.8 else str(number)
        axes.text(number + 0.5, -0.75, name, ha="center", fontsize=8.5, color=GREY)
    if column <= 0.8:
        axes.text(-0.1 / column, -0.75, "round", ha="right", fontsize=8.5, color=GREY)
    return figure


def _middle(scene: ScanScene, rank: int) -> float:
    """Return the y coordinate of a rank's line. Ranks of a node are 1 apart."""
    return rank + GAP * (rank // scene.grid.intra)


def _chain(axes: Axes, scene: ScanScene) -> None:
    """Draw the pieces of all documents in the order of positions.

    A piece is a run of consecutive positions of a document on one rank. Its width is proportional
    to its number of positions.
    """
    chain = scene.chains
    edges = np.cumsum([0, *(int(chain.table[i, 2]) for i in scene.pieces)]).tolist()
    colours = [of_rank(int(chain.rank[i]), chain.ranks) for i in scene.pieces]
    runs, total = list(itertools.pairwise(edges)), edges[-1]
    lanes.bars(axes, 0, 1, runs, colours, [str(i) for i in scene.pieces], size=8, width=1.0,
               least=np.nextafter(total / 40, total))  # fmt: skip
    for i, (start, _) in zip(scene.pieces, runs, strict=True):
        if start and (chain.ends[i] if scene.backward else chain.begins[i]):
            axes.plot([start, start], [-0.25, 1.25], color=INK, linewidth=1.4, clip_on=False)
    axes.text(-0.01, 0.5, "pieces", transform=axes.transAxes, ha="right", va="center",
              fontsize=8.5, color=GREY)  # fmt: skip
    axes.set_xlim(0, total)
    axes.set_ylim(0, 1)
    axes.set_axis_off()


def _ranks(axes: Axes, scene: ScanScene, rounds: int, column: float) -> None:
    """Draw a horizontal line for each rank, with a dot before and after each round.

    Args:
        axes: Axes to draw on.
        scene: The scene.
        rounds: Number of rounds.
        column: Width of a round in inches.
    """
    for rank in range(scene.grid.size):
        colour, y = of_rank(rank, scene.grid.size), _middle(scene, rank)
        axes.plot([0, rounds], [y, y], color=RULE, linewidth=0.7, zorder=0)
        dots = range(rounds + 1)
        axes.plot(dots, [y for _ in dots], "o", color=colour, ms=5, clip_on=False)
        axes.text(
            -0.1 / column, y, f"rank {rank}", ha="right", va="center", fontsize=8.5, color=INK
        )
    axes.set_xlim(0, rounds)
    axes.set_ylim(_middle(scene, scene.grid.size - 1) + 0.5, -0.5)
    axes.set_axis_off()


def _hop(axes: Axes, scene: ScanScene, hop: int, column: float) -> None:
    """Draw a transfer as an arrow from sender to receiver, red if it leads to another node.

    Args:
        axes: Axes to draw on.
        scene: The scene.
        hop: Index of the transfer. It has a label if its round has at most `LABELS` transfers.
        column: Width of a round in inches.
    """
    hops = scene.hops
    number, source = int(hops.round[hop]), int(hops.source[hop])
    begin, end = _middle(scene, source), _middle(scene, int(hops.destination[hop]))
    colour = WARN if scene.between[hop] else of_rank(source, scene.grid.size)
    axes.annotate(
        "", xy=(number + 1 - 0.06 / column, end), xytext=(number + 0.06 / column, begin),
        arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 1.1,
                    "shrinkA": 0, "shrinkB": 0, "mutation_scale": 8},
    )  # fmt: skip
    if int((hops.round == number).sum()) <= LABELS:
        share = 0.36
        axes.text(
            number + share, begin + share * (end - begin), scene.name(hop), fontsize=7,
            ha="center", va="center", color=INK,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
        )  # fmt: skip


# --- trees ---------------------------------------------------------------------------------

PATHS = 6.0  # width of the longest path in inches
COLUMNS = 0.85  # height of the columns of ranks in inches
THICK = 0.72  # thickness of a bar, as a fraction of its lane


def _tree(scene: TreeScene) -> Figure:
    """Draw the segments of a tree, the mask, and the rows and visible pairs of each rank."""
    foot = 0.45 + 0.19 * len(words.caption(scene))
    figure = _headed(0.9 + PATHS + SIDE + 0.4, foot + COLUMNS + 0.85 + SIDE + 1.0, scene)
    bottom = foot + COLUMNS + 0.8
    paths = box(figure, 0.3, bottom, PATHS, SIDE)
    paths.set_title("segments, from the root to the right", loc="left", fontsize=10)
    _segments(paths, scene)
    computers, step = scene.sampled(SAMPLED)
    mask = box(figure, 0.85 + PATHS, bottom, SIDE, SIDE)
    _matrix(mask, computers, scene.grid.size)
    sampling = "" if step == 1 else f", every {step} rows"
    mask.set_title(f"mask: rows depth first{sampling}", loc="left", fontsize=10)
    mask.set_xlabel("key", labelpad=2)
    mask.set_ylabel("query", labelpad=2)
    mask.set_xticks([0, len(computers)], ["0", f"{scene.shards.seq_len:,}"])
    mask.set_yticks([])
    wide = (PATHS + SIDE + 0.55 - 0.4) / 2
    for i, (name, counts) in enumerate((("rows", scene.rows), ("visible pairs", scene.work))):
        axes = box(figure, 0.3 + i * (wide + 0.4), foot, wide, COLUMNS)
        axes.set_title(f"{name} of each rank", loc="left", fontsize=10)
        _columns(axes, counts, max(counts))
        for rank in range(scene.grid.size):
            axes.annotate(str(rank), (rank, 0), (0, -3), textcoords="offset points", ha="center",
                          va="top", fontsize=min(8, 130 / scene.grid.size), color=GREY)  # fmt: skip
    return figure


def _segments(axes: Axes, scene: TreeScene) -> None:
    """Draw one bar per segment, and lines from segments to their children."""
    segments, ranks = scene.segments, scene.grid.size
    runs = [scene.runs(segment) for segment in segments]
    width = 0.5 if sum(map(len, runs)) <= 256 else 0
    for segment in segments:
        if segment.parent >= 0:
            ends = [segments[segment.parent].lane, segment.lane]
            axes.plot([segment.depth] * 2, ends, color=GREY, linewidth=0.8, zorder=0)
    for segment, parts in zip(segments, runs, strict=True):
        owners = [rank for *_, rank in parts]
        lanes.bars(axes, segment.lane - THICK / 2, THICK, [run[:2] for run in parts],
                   [of_rank(rank, ranks) for rank in owners], list(map(str, owners)),
                   least=scene.depth / 40 if scene.lanes <= 32 else np.inf, size=7.5,
                   width=width)  # fmt: skip
    axes.set_xlim(0, scene.depth)
    axes.set_ylim(max(scene.lanes, 4) - 0.5, -0.5)
    axes.set_xticks([0, scene.depth], ["0", f"{scene.depth:,}"])
    axes.set_xlabel("position on the path", labelpad=-4)
    axes.set_yticks([])
    axes.tick_params(length=0, pad=3)
    axes.spines[["top", "right", "left"]].set_visible(False)


DRAWERS: dict[type, Callable[[Any], Figure]] = {
    MaskScene: _mask,
    LayoutScene: _layouts,
    ScanScene: _scan,
    ScheduleScene: timeline.draw,
    TreeScene: _tree,
}

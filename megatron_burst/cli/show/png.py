"""Scenes as PNG, with matplotlib: the score matrix and the layouts; `timeline` draws schedules,
`pack_png` packed documents, and `scan_png` scans of states.

The files are small, and have the same bytes for the same scene and the same matplotlib, so that a
generated document changes only with its content.
"""

from __future__ import annotations

import io
import itertools
from pathlib import Path

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from . import pack_png, scan_png, timeline, words
from .colours import GREY, INK, PAPER, RULE, channels, ink_on, mixed, of_rank
from .packs import PackScene
from .page import box, headed
from .scans import ScanScene
from .scene import LayoutScene, MaskScene

STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": GREY,
    "axes.edgecolor": RULE,
    "axes.linewidth": 0.8,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "hatch.linewidth": 0.7,
}
DPI = 120
SHADES = 96  # colours of a file: flat areas and their smoothed edges


def draw(scene: words.Scene, path: Path, rank: int | None = None) -> None:
    """Write the PNG of a scene; of a schedule, with `rank`, only that rank's part."""
    with style.context(["default", STYLE], after_reset=True):
        if isinstance(scene, MaskScene):
            figure = _mask(scene)
        elif isinstance(scene, LayoutScene):
            figure = _layouts(scene)
        elif isinstance(scene, PackScene):
            figure = pack_png.draw(scene)
        elif isinstance(scene, ScanScene):
            figure = scan_png.draw(scene)
        else:
            figure = timeline.draw(scene, rank)
        _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    """Write with a palette, and without metadata, which differs between versions."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    picture = Image.open(buffer).convert("RGB")
    dither = Image.Dither.NONE
    picture.quantize(SHADES, method=Image.Quantize.MEDIANCUT, dither=dither).save(
        path, format="png", optimize=True
    )


# --- the score matrix ----------------------------------------------------------------------

SIDE = 3.9  # inches of a matrix


def _mask(scene: MaskScene) -> Figure:
    shards = scene.shards
    figure = headed(11.1, 5.8, scene)
    bottom = 0.8
    whole = box(figure, 0.62, bottom, SIDE, SIDE)
    sharded = box(figure, 5.15, bottom, SIDE, SIDE)
    bars = box(figure, 9.2, bottom, 1.45, SIDE)
    _matrix(whole, scene.computers, shards.size)
    whole.set_title("global order", loc="left", fontsize=10, color=INK)
    whole.set_ylabel("query position", labelpad=2)
    whole.set_xlabel("key position", labelpad=2)
    ends = [0, shards.seq_len - 1]
    for axis in (whole.xaxis, whole.yaxis):
        axis.set_ticks(ends, [str(end) for end in ends])
    _matrix(sharded, scene.computers[np.ix_(shards.order, shards.order)], shards.size)
    sharded.set_title("shard order, and the step of each pair of shards", loc="left", fontsize=10)
    _blocks(sharded, scene)
    _work_bars(bars, scene)
    return figure


def _matrix(axes: Axes, computers: np.ndarray, ranks: int) -> None:
    colours = np.array(
        [channels(of_rank(rank, ranks)) for rank in range(ranks)] + [channels(PAPER)]
    )
    picture = colours[computers].astype(np.uint8)  # -1, not visible, is the last one
    size = len(computers)
    axes.imshow(picture, interpolation="nearest", extent=(0, size, size, 0))
    if size <= 64:  # in a larger matrix the lines between positions would cover them
        ticks = np.arange(1, size)
        axes.hlines(ticks, 0, size, colors="white", linewidth=0.35)
        axes.vlines(ticks, 0, size, colors="white", linewidth=0.35)
    axes.tick_params(length=0, pad=3)


def _blocks(axes: Axes, scene: MaskScene) -> None:
    """Rules between ranks, and the step of every pair of shards that is computed."""
    shards = scene.shards
    edges = np.cumsum([0, *shards.lengths])
    middles = (edges[:-1] + edges[1:]) / 2
    axes.hlines(edges, 0, shards.seq_len, colors=INK, linewidth=0.7, clip_on=False)
    axes.vlines(edges, 0, shards.seq_len, colors=INK, linewidth=0.7, clip_on=False)
    for i, j in np.ndindex(scene.steps.shape):
        if scene.steps[i, j] >= 0 and shards.size <= 16:
            _step(axes, scene, (i, j), edges)
    names = [str(rank) for rank in range(shards.size)]
    axes.set_xticks(middles, names, fontsize=min(9, 100 / shards.size))
    axes.set_yticks(middles, names, fontsize=min(9, 100 / shards.size))
    axes.set_xlabel("rank that holds the keys", labelpad=2)
    axes.set_ylabel("rank that holds the queries", labelpad=2)


def _step(axes: Axes, scene: MaskScene, pair: tuple[int, int], edges: np.ndarray) -> None:
    """The number of the step, in the quarter of the pair where it covers the fewest positions."""
    order = scene.shards.order
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


def _work_bars(axes: Axes, scene: MaskScene) -> None:
    """The work of each rank beside its rows, and the mean as a dashed line."""
    shards, work = scene.shards, scene.shards.work
    edges = np.cumsum([0, *shards.lengths])
    middles, height = (edges[:-1] + edges[1:]) / 2, edges[1] - edges[0]
    axes.set_title("work", loc="left", fontsize=10)
    colours = [of_rank(rank, shards.size) for rank in range(shards.size)]
    axes.barh(middles, work, height=0.62 * height, color=colours)
    mean = sum(work) / len(work)
    axes.axvline(mean, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.set_ylim(shards.seq_len, 0)
    axes.set_xlim(0, max([*work, 1]) * 1.02)
    axes.set_xticks([mean], [f"mean {mean:,.0f}"])
    axes.set_yticks([])
    axes.tick_params(length=0, pad=3)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)


# --- layouts -------------------------------------------------------------------------------

STRIP = 0.42  # inches of a strip
PITCH = 0.86


def _layouts(scene: LayoutScene) -> Figure:
    bars = bool(scene.rows[0].mask_text)
    wide, most = 8.2, max(max(shards.work) for shards in scene.rows)
    height = 0.95 + PITCH * len(scene.rows)
    figure = headed(wide + 0.6 + 2.1 * bars, height, scene, numbers=False)
    for row, shards in enumerate(scene.rows):
        bottom = height - 0.8 - PITCH * (row + 1) + 0.18
        axes = box(figure, 0.3, bottom, wide, STRIP)
        axes.set_title(shards.layout_text, loc="left", fontsize=10, pad=4)
        _strip(axes, shards.holders, shards.size)
        if bars:
            axes = box(figure, wide + 0.65, bottom, 1.75, STRIP)
            best = " (least)" * (shards.layout_text == scene.best)
            axes.set_title(
                f"imbalance {shards.imbalance:.2f}{best}", loc="left", fontsize=10, pad=4
            )
            _columns(axes, shards.work, most)
    return figure


def _strip(axes: Axes, holders: np.ndarray, ranks: int) -> None:
    """One box for each run of positions of a rank, with the rank's number if there is room."""
    count = len(holders)
    cuts = np.flatnonzero(np.diff(holders)) + 1
    edges = [0, *cuts.tolist(), count]
    for start, stop in itertools.pairwise(edges):
        colour = of_rank(int(holders[start]), ranks)
        axes.barh(0.5, stop - start, left=start, height=1, color=colour, edgecolor="white",
                  linewidth=0.6 if len(edges) <= 257 else 0)  # fmt: skip
        if (stop - start) / count >= 1 / 80:
            axes.text((start + stop) / 2, 0.5, str(holders[start]), ha="center", fontsize=8.5,
                      va="center_baseline", color=ink_on(colour))  # fmt: skip
    axes.set_xlim(0, count)
    axes.set_ylim(0, 1)
    axes.set_axis_off()


def _columns(axes: Axes, work: list[int], most: int) -> None:
    """The work of each rank as columns, and the mean as a dashed line."""
    ranks = len(work)
    colours = [of_rank(rank, ranks) for rank in range(ranks)]
    axes.bar(range(ranks), work, width=0.78, color=colours)
    axes.axhline(sum(work) / ranks, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.axhline(0, color=mixed(GREY, "#ffffff", 0.4), linewidth=0.8)
    axes.set_ylim(0, max(most, 1) * 1.03)
    axes.set_axis_off()

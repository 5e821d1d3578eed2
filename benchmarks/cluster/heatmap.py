"""Figure of docs/cluster.md: one row per cell, one column per rival, colour by relative time.

Every label is a number of the tables: time of a rival / time of the fastest fixed rival in the row.
The right column is the faster of burst and `auto`, relative to its own limit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .cells import REGIMES, RIVALS
from .results import Kept, Setting

OURS = ("burst", "double_ring, overlapped", "auto")  # the second is burst with side kv
COLUMNS = tuple(rival.name for rival in RIVALS)
BANDS = {
    "communication": "communication: compute takes no time",
    "balanced": "balanced: compute takes as long as burst's busiest links",
    "compute": "compute: compute takes 3 times as long as burst's busiest links",
    "hidden": "hidden: compute takes 6 times as long as burst's busiest links",
    "real": "real: compute is real, on the cores that also carry the links",
}
SLOWEST, DARK = 6.0, 2.8  # ratios: of the darkest colour; smallest with white labels


class Line(NamedTuple):
    """One row of the figure: its name, and a label per column (none if nothing ran)."""

    regime: str
    words: tuple[str, ...]  # grid, rates, heads, tokens
    ratios: dict[str, float]  # rival -> time over the fastest fixed rival's time
    over_limit: float | None


def lines(settings: Iterable[Setting]) -> list[Line]:
    """Return the settings, by regime, grid, rates (fastest first), heads and tokens."""
    order = (*REGIMES, "real")

    def key(setting: Setting) -> tuple[Any, ...]:
        cell = setting.cell
        place = order.index(cell.regime), cell.nodes, cell.per_node, -cell.rates.inter
        return *place, cell.heads != "MHA", cell.heads, cell.tokens

    return [_line(setting) for setting in sorted(settings, key=key)]


def _line(setting: Setting) -> Line:
    cell = setting.cell
    best = None if setting.gflops is None else fastest(setting)
    return Line(
        cell.regime,
        (f"{cell.nodes} x {cell.per_node}", str(cell.rates), cell.heads, str(cell.tokens)),
        {row.rival: row.over_fixed for row in setting.rivals},
        best and best.over_limit,
    )


def fastest(setting: Setting) -> Kept | None:
    """Return the faster of burst and `auto`; None if neither ran."""
    ours = [row for row in setting.rivals if row.rival.startswith(OURS)]
    return min(ours, key=lambda row: row.seconds, default=None)


def digest(settings: Iterable[Setting]) -> str:
    """Return a hash of the content of the figure; `draw` stores it in the file for a test."""
    return hashlib.sha256(json.dumps([lines(settings), COLUMNS, BANDS]).encode()).hexdigest()


def draw(settings: Sequence[Setting], path: Path) -> None:
    """Draw the figure as a PNG, with a block of rows per regime."""
    from matplotlib.figure import Figure

    blocks = [
        (regime, list(block)) for regime, block in groupby(lines(settings), lambda x: x.regime)
    ]
    heights = [len(block) for _, block in blocks]
    figure = Figure(
        figsize=(11.5, 3 + 0.5 * len(blocks) + 0.26 * sum(heights)), layout="constrained"
    )
    figure.suptitle("Forward + backward: time over that of the fastest fixed algorithm of the row")
    axes = figure.subplots(len(blocks), 1, squeeze=False, height_ratios=heights)[:, 0]
    for index, (axis, (regime, block)) in enumerate(zip(axes, blocks, strict=True)):
        _block(axis, block)
        axis.set_title(BANDS[regime], fontsize=9, loc="left", weight="bold")
        heads = [*(name.replace(", ", ",\n") for name in COLUMNS), "burst or auto\nover its limit"]
        axis.xaxis.tick_top()
        axis.set_xticks(range(len(heads)), heads if index == 0 else [], fontsize=8, rotation=60,
                        ha="left", rotation_mode="anchor")  # fmt: skip
    words = "bold: the fastest, and auto where it is as fast or faster; grey: not run"
    figure.supxlabel(words, fontsize=8.5)
    figure.savefig(path, dpi=90, metadata={"Software": None, "Description": digest(settings)})


def _block(axis: Any, lines_of_block: Sequence[Line]) -> None:
    from matplotlib.colors import LogNorm

    table = np.array([[row.ratios.get(name, np.nan) for name in COLUMNS] for row in lines_of_block])
    image = np.hstack(
        [table, np.full((len(lines_of_block), 1), np.nan)]
    )  # the last column has no colour
    axis.set_facecolor("#eef0f2")
    axis.imshow(image, cmap="YlOrRd", norm=LogNorm(0.9, SLOWEST, clip=True), aspect="auto")
    axis.set_yticks(
        range(len(lines_of_block)), ["   ".join(row.words) for row in lines_of_block], fontsize=8
    )
    axis.tick_params(length=0)
    for y, row in enumerate(lines_of_block):
        best = min(ratio for name, ratio in row.ratios.items() if not name.startswith("auto"))
        labels = [*table[y], np.nan if row.over_limit is None else row.over_limit]
        for x, ratio in enumerate(labels):
            if not np.isnan(ratio):
                coloured = x < len(COLUMNS)
                axis.text(x, y, f"{ratio:.2f}", ha="center", va="center", fontsize=8,
                          color="white" if coloured and ratio > DARK else "black",
                          weight="bold" if coloured and ratio <= best else "normal")  # fmt: skip

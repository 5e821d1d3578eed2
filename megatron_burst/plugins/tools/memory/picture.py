# SPDX-License-Identifier: Apache-2.0
"""Picture of a GPU's memory over one training step: one area per item, stacked.

All phases of the step have the same width.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from ....autotune.clusters import GIB, Cluster
from .. import lanes
from ..advise.account.memory import Account
from ..advise.account.tape import Moment
from ..show.colours import MEANINGS, WARN

ORDER = (
    "parameters", "gradients", "optimizer", "rope tables", "batch", "other micro-batches",
    "layer inputs", "attention store", "between layers", "weight gradients of a layer",
    "LM head and loss", "attention half", "MLP half", "ring buffers",
)  # fmt: skip
COLUMNS = 6  # maximum number of columns of a phase
AFTER_HEAD = ("recompute", "backward")
STATES = ("#c7ccd4", "#aab1bc", "#8d96a3", "#747d8b", "#5f6876", "#4b5461")


def draw(account: Account, cluster: Cluster, path: Path) -> None:
    """Draw the predicted memory of a GPU over a training step, by item, and write the file."""
    run, peak = account.run, account.peak
    title = (
        f"{account.model.name}, {run.seq:,} tokens on {cluster.gpus} x {cluster.gpu.name}: memory "
        "of one GPU over one step"
    )
    subtitle = (
        f"analytical estimate; TP {run.tp}, CP {run.cp}, PP {run.pp}, row chunks: "
        f"{run.sequence_chunks}, MLP tiles: {run.mlp_tiles}, offload {run.offload:g}; peak "
        f"{peak.bytes / GIB:.1f} GiB: {peak.phase}"
    )
    with lanes.styled():
        figure = lanes.headed(11, 5.2, title, subtitle)
        axes = lanes.box(figure, 0.77, 0.78, 7.7, 3.64)
        places, moments, marks = _times(account)
        items = [item for item in ORDER if any(item in m.items for m in moments)]
        areas = [[m.items.get(item, 0) / GIB for m in moments] for item in items]
        grey = iter(STATES)  # colours of items that exist during the whole step
        colours = [MEANINGS.get(item) or next(grey) for item in items]
        axes.stackplot(places, areas, colors=colours, linewidth=0)
        axes.axhline(cluster.room / GIB, color=WARN, linewidth=1.2, linestyle=(0, (5, 3)))
        axes.text(places[-1], cluster.room / GIB, f" {cluster.gpu.name}", color=WARN, va="center")
        axes.set_xlim(0, places[-1])
        axes.set_ylim(0, 1.05 * max(cluster.room, peak.bytes) / GIB)
        axes.set_ylabel("GiB of one GPU")
        axes.set_xticks(list(marks.values()), [f"{name}, all layers" for name in marks])
        axes.spines[["top", "right"]].set_visible(False)
        handles = reversed([axes.collections[i] for i in range(len(items))])
        figure.legend(
            handles, reversed(items), loc="center left", bbox_to_anchor=(0.8, 0.5), frameon=False
        )
        lanes.save(figure, path, lanes.ALL_SHADES)


def _times(account: Account) -> tuple[list[float], list[Moment], dict[str, float]]:
    """Return the columns of the picture, and the marks of its x axis.

    A phase, such as forward of one layer, has width 1 and up to `COLUMNS` columns. A column
    represents several moments and shows the one with the most bytes.

    Returns:
        The left and the right x coordinate of each column; the moment that it shows, twice; and a
            dict from the name of several phases, such as "forward" of all layers, to the x
            coordinate of their centre.
    """
    places: list[float] = []
    moments: list[Moment] = []
    begins: dict[str, list[int]] = {}
    for at, (name, group) in enumerate(groupby(account.moments, lambda moment: moment.phase)):
        of_phase = list(group)
        size = -(-len(of_phase) // COLUMNS)
        columns = [of_phase[i : i + size] for i in range(0, len(of_phase), size)]
        for index, column in enumerate(columns):
            most = max(column, key=lambda moment: moment.bytes)
            places += [at + index / len(columns), at + (index + 1) / len(columns)]
            moments += [most, most]
        way = name.split(" of ")[0] if " of layer" in name else name
        begins.setdefault("recompute and backward" if way in AFTER_HEAD else way, []).append(at)
    shown = {name: (ats[0] + ats[-1] + 1) / 2 for name, ats in begins.items() if len(ats) > 1}
    return places, moments, shown

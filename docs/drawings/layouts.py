"""Positions that each rank holds and pairs that it computes, in three layouts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import megatron_burst as mb
from drawings.paper import box, figure
from megatron_burst.plugins.tools.show.colours import GREY, INK, channels, ink_on, of_rank
from megatron_burst.plugins.tools.show.scene import Shards

RANKS, LENGTH = 4, 32
LAYOUTS = ("contiguous", "zigzag", "striped")


def work_of(name: str) -> list[int]:
    """Return the number of visible pairs of each rank in a layout."""
    layout = mb.layout.make(name, cp_size=RANKS)
    return Shards(mb.masks.Causal(), layout, LENGTH, "causal", name).work


def layout_caption(name: str) -> str:
    work = work_of(name)
    spread = f"{min(work)} to {max(work)}" if min(work) != max(work) else str(work[0])
    return f"{name}: {spread} visible pairs per rank"


def draw_layouts() -> Figure:
    subtitle = "the colour is the rank that holds the query and computes the pair"
    made = figure(9.4, 6.3, "Which positions each rank holds",
                  f"{LENGTH} positions, {RANKS} ranks, causal: {subtitle}")  # fmt: skip
    causal = mb.masks.Causal().visible(np.arange(LENGTH)[:, None], np.arange(LENGTH)[None, :])
    for i, name in enumerate(LAYOUTS):
        layout = mb.layout.make(name, cp_size=RANKS)
        holder = np.empty(LENGTH, dtype=int)
        for rank in range(RANKS):
            holder[layout.positions(rank, LENGTH)] = rank
        bottom = 4.05 - 1.85 * i
        _strip(box(made, 0.3, bottom + 0.62, 4.6, 0.42), holder, name)
        square = box(made, 5.15, bottom, 1.5, 1.5)
        _pixels(square, np.where(causal, holder[:, None], -1))
        _bars(box(made, 7.35, bottom, 1.6, 1.5), work_of(name))
    return made


def _strip(axes: Axes, holder: np.ndarray, name: str) -> None:
    for position, rank in enumerate(holder):
        colour = of_rank(int(rank), RANKS)
        axes.add_patch(Rectangle((position, 0), 0.94, 1, facecolor=colour))
        axes.text(position + 0.47, 0.5, str(rank), ha="center", va="center_baseline", fontsize=6.5,
                  color=ink_on(colour))  # fmt: skip
    axes.set_xlim(0, len(holder))
    axes.set_ylim(0, 1)
    axes.set_axis_off()
    axes.set_title(name, loc="left", fontsize=10, fontweight="bold", color=INK)
    axes.text(0, -0.25, "position 0", fontsize=7.5, color=GREY, va="top")
    axes.text(
        len(holder), -0.25, str(len(holder) - 1), fontsize=7.5, color=GREY, va="top", ha="right"
    )


def _pixels(axes: Axes, ranks: np.ndarray) -> None:
    """Draw a square of pairs in the colours of ranks, queries downwards; -1 is a hidden pair."""
    image = np.ones((*ranks.shape, 3))
    for rank in range(RANKS):
        image[ranks == rank] = np.array(channels(of_rank(rank, RANKS))) / 255
    axes.imshow(image, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_xlabel("keys", fontsize=8, labelpad=2)
    axes.set_ylabel("queries", fontsize=8, labelpad=2)


def _bars(axes: Axes, work: Sequence[int]) -> None:
    axes.barh(range(RANKS), work, 0.7, color=[of_rank(rank, RANKS) for rank in range(RANKS)])
    for rank, pairs in enumerate(work):
        axes.text(pairs + 5, rank, str(pairs), va="center_baseline", fontsize=8)
    axes.set_ylim(RANKS - 0.5, -0.5)
    axes.set_xlim(0, 270)
    axes.set_yticks(range(RANKS), [f"rank {rank}" for rank in range(RANKS)], fontsize=8)
    axes.set_xticks([])
    axes.set_xlabel("visible pairs", fontsize=8, labelpad=2)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def captions() -> list[str]:
    """Return the numbers of the drawing as lines of text."""
    return [layout_caption(name) for name in LAYOUTS]


DRAWINGS = {"layouts": draw_layouts}

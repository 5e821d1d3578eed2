"""Packed documents as a picture: for each layout a row per rank, and the work of the ranks."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import words
from .colours import GREY, INK, PAPER, ink_on, of_document
from .packs import PADDING, Held, PackScene
from .page import box, headed

WIDE, BARS = 7.6, 2.0  # inches of the rows and of the bars
TALLEST, ALL = 0.3, 2.6  # inches of a row, and of all rows of a layout where these are many
PLATE = 0.62  # inches above the rows of a layout
GAP = 0.4  # between nodes, in rows
NUMBERED = 0.03  # of the width: the narrowest run with a number in it


def draw(scene: PackScene) -> Figure:
    """A figure of all layouts, one below the other, on one scale."""
    grid = scene.grid
    tall = min(TALLEST, ALL / grid.size) * (grid.size + GAP * (grid.inter - 1))
    height = 0.85 + (PLATE + tall) * len(scene.held)
    figure = headed(0.85 + WIDE + BARS, height, scene, numbers=False)
    most = max(1, *(pairs for held in scene.held for pairs in held.work))
    longest = max(len(rows) for held in scene.held for rows in held.rows)
    for i, held in enumerate(scene.held):
        bottom = height - 0.7 - (PLATE + tall) * (i + 1)
        rows = box(figure, 0.5, bottom, WIDE, tall)
        name, numbers = held.name, words.held_so(held)
        left, top = 0.5 / figure.get_figwidth(), bottom + tall
        figure.text(left, (top + 0.25) / height, name, fontsize=10, fontweight="bold")
        figure.text(left, (top + 0.08) / height, numbers, fontsize=8.5, color=GREY)
        _rows(rows, held, longest, min(7.5, 50 * tall / grid.size))
        _bars(box(figure, 0.6 + WIDE, bottom, BARS, tall), held, most)
    return figure


def _height(held: Held, rank: int) -> float:
    """Where the row of a rank lies, in rows from the first."""
    return rank + GAP * (rank // held.grid.intra)


def _rows(axes: Axes, held: Held, longest: int, size: float) -> None:
    """Of every rank a row of runs, the documents in their colours, with numbers of this size."""
    ranks = held.grid.size
    for rank in range(ranks):
        runs = held.runs(rank)
        colours = [PAPER if of == PADDING else _colour(held, of) for _, _, of in runs]
        axes.broken_barh(
            [(start, stop - start) for start, stop, _ in runs], (_height(held, rank), 0.86),
            facecolors=colours, edgecolor="white", linewidth=0.6 if len(runs) < 60 else 0,
        )  # fmt: skip
        for (start, stop, document), colour in zip(runs, colours, strict=True):
            if document != PADDING and stop - start >= NUMBERED * longest and size >= 4:
                axes.text(
                    (start + stop) / 2, _height(held, rank) + 0.43, str(document), ha="center",
                    va="center_baseline", fontsize=size, color=ink_on(colour),
                )  # fmt: skip
    axes.set_yticks(
        [_height(held, rank) + 0.43 for rank in range(ranks)],
        [str(rank) for rank in range(ranks)],
        fontsize=max(4.0, size),
    )
    axes.set_xlim(0, longest)
    axes.set_ylim(_height(held, ranks - 1) + 1, 0)
    axes.set_xticks([])
    axes.tick_params(length=0, pad=3)
    axes.spines[:].set_visible(False)


def _colour(held: Held, document: int) -> str:
    return of_document(held.pack.places[document], len(held.pack.real))


def _bars(axes: Axes, held: Held, most: int) -> None:
    """The visible pairs of each rank, and the mean as a dashed line."""
    ranks = held.grid.size
    places = [_height(held, rank) + 0.43 for rank in range(ranks)]
    axes.barh(places, held.work, height=0.62, color=GREY)
    axes.axvline(sum(held.work) / ranks, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.set_ylim(_height(held, ranks - 1) + 1, 0)
    axes.set_xlim(0, most * 1.02)
    axes.set_axis_off()

"""Mirrored shares of one document, and the parts of documents on four ranks in layout balanced."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import megatron_burst as mb
from drawings.paper import box, figure
from megatron_burst.plugins.tools.show.colours import (
    GREY,
    INK,
    channels,
    ink_on,
    mixed,
    of_rank,
)
from megatron_burst.plugins.tools.show.colours import (
    RANKS as COLOURS,
)
from megatron_burst.plugins.tools.show.scene import LayoutScene, Shards

LENGTH, SHARES = 32, (4, 8, 20)  # tokens of a document, and tokens of its shares
LENGTHS = (210, 14, 60, 9, 32, 100, 5, 41, 20, 13, 6, 2)
RANKS = 4


def shares() -> list[np.ndarray]:
    """Return the positions of each share, taken from both ends of the document in turn."""
    mirrored = [i // 2 if i % 2 == 0 else LENGTH - 1 - i // 2 for i in range(LENGTH)]
    edges = np.cumsum([0, *SHARES])
    return [np.array(mirrored[a:b]) for a, b in pairwise(edges)]


def pairs_of(share: np.ndarray) -> int:
    """Return the number of visible pairs whose queries are at these positions of a document."""
    return int((share + 1).sum())


def scene() -> LayoutScene:
    """Return the scene of the pack in layouts zigzag and balanced."""
    bounds = np.cumsum([0, *LENGTHS])
    mask = mb.masks.Documents(bounds) & mb.masks.Causal()
    made = {
        "zigzag": mb.layout.make("zigzag", cp_size=RANKS),
        "balanced": mb.layout.make("balanced", cp_size=RANKS, cu_seqlens=bounds, per_node=RANKS),
    }
    rows = (Shards(mask, layout, sum(LENGTHS), "causal", name) for name, layout in made.items())
    return LayoutScene(tuple(rows))


def colour_of(document: int) -> str:
    """Return the colour of a document: the longest documents have colours, all others are grey."""
    place = sorted(range(len(LENGTHS)), key=lambda i: -LENGTHS[i]).index(document)
    if place < len(COLOURS):
        return COLOURS[place]
    return mixed(GREY, "#ffffff", 0.15 + 0.6 * (place - len(COLOURS)) / len(LENGTHS))


def draw_packing() -> Figure:
    made = figure(9.4, 4.3, "Parts of documents on four ranks",
                  "the area of a part is its visible pairs; the dashed line is the mean of all "
                  "tokens")  # fmt: skip
    _triangle(box(made, 0.55, 0.95, 2.3, 2.3))
    balanced = scene().rows[-1]
    whole = max(LENGTHS) / 2
    for rank in range(RANKS):
        axes = box(made, 3.5 + 1.45 * rank, 0.95, 1.3, 2.3)
        _mixture(axes, balanced, rank, whole)
        axes.set_xlabel(f"rank {rank}\n{balanced.work[rank]:,} pairs", fontsize=8, labelpad=3)
        axes.set_ylabel("visible keys per token" * (rank == 0), fontsize=8, labelpad=2)
    return made


def _triangle(axes: Axes) -> None:
    """Draw the causal triangle of one document, with each row in the colour of its share."""
    owner = np.empty(LENGTH, dtype=int)
    for number, share in enumerate(shares()):
        owner[share] = number
    image = np.ones((LENGTH, LENGTH, 3))
    for row, number in enumerate(owner):
        image[row, : row + 1] = np.array(channels(of_rank(int(number), 9))) / 255
    axes.imshow(image, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title(f"one document of {LENGTH} tokens", loc="left", fontsize=9, color=INK)
    for number, share in enumerate(shares()):
        text = f"{len(share)} tokens: {pairs_of(share) / len(share):.1f} keys per token"
        axes.text(LENGTH - 1, 1.5 + 2.9 * number, text, fontsize=6.6, ha="right",
                  color=of_rank(number, 9) if number != 1 else GREY)  # fmt: skip
    axes.set_ylabel("queries", fontsize=8, labelpad=2)
    axes.set_xlabel("keys", fontsize=8, labelpad=2)
    axes.spines[:].set_color("#d1d5db")


def _mixture(axes: Axes, balanced: Shards, rank: int, whole: float) -> None:
    """Draw the parts of documents on a rank as rectangles.

    The width is the number of tokens, the height the mean number of visible keys of a token.
    """
    rows = balanced.layout.positions(rank, balanced.seq_len)
    documents = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    first = np.repeat(np.cumsum([0, *LENGTHS[:-1]]), LENGTHS)
    left = 0
    for document in sorted(set(documents[rows].tolist()), key=lambda i: -LENGTHS[i]):
        mine = rows[documents[rows] == document]
        keys = float((mine - first[mine] + 1).mean())
        colour = colour_of(document)
        axes.add_patch(Rectangle((left, 0), len(mine), keys, facecolor=colour, edgecolor="white",
                                 linewidth=0.6))  # fmt: skip
        if len(mine) >= 9:
            inside = keys > 12
            axes.text(left + len(mine) / 2, keys / 2 if inside else keys + 2,
                      str(LENGTHS[document]), ha="center", fontsize=6.5,
                      va="center_baseline" if inside else "bottom",
                      color=ink_on(colour) if inside else INK)  # fmt: skip
        left += len(mine)
    mean = sum(balanced.work) / balanced.seq_len
    axes.axhline(mean, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.set_xlim(0, len(rows))
    axes.set_ylim(0, whole * 1.04)
    axes.set_xticks([])
    axes.set_yticks([0, round(mean), round(whole)] if rank == 0 else [])
    axes.tick_params(length=0, pad=2, labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def captions() -> list[str]:
    """Return the numbers of the drawing as lines of text."""
    parts = [f"{len(share)} tokens: {pairs_of(share)} visible pairs" for share in shares()]
    rows = [(each.layout_text, min(each.work), max(each.work)) for each in scene().rows]
    return [*parts, *(f"{name}: {a:,} to {b:,} visible pairs per rank" for name, a, b in rows)]


DRAWINGS = {"packing": draw_packing}

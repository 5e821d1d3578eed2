# SPDX-License-Identifier: Apache-2.0
"""Colours of pictures that colour-blind readers can distinguish.

Up to nine ranks use Paul Tol's "muted" colour scheme, ordered so that adjacent ranks differ in
lightness. More ranks use the perceptually uniform colour map viridis. Compute, transfers and items
of memory have the same colours in all commands (`MEANINGS`).
"""

from __future__ import annotations

INK, GREY, RULE, PAPER = "#1f2430", "#6b7280", "#d1d5db", "#f3f4f6"
WARN = "#c2410c"

RANKS = (
    "#332288", "#88ccee", "#117733", "#ddcc77", "#882255", "#44aa99", "#cc6677", "#999933",
    "#aa4499",
)  # fmt: skip
# Nine equidistant points of viridis.
SCALE = (
    "#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30",
    "#fde725",
)  # fmt: skip


def of_rank(rank: int, ranks: int) -> str:
    """Return the colour of rank `rank` of `ranks` ranks, as #rrggbb."""
    if ranks <= len(RANKS):
        return RANKS[rank]
    place = rank / (ranks - 1) * (len(SCALE) - 1)
    low = min(int(place), len(SCALE) - 2)
    return mixed(SCALE[low], SCALE[low + 1], place - low)


def mixed(a: str, b: str, share: float) -> str:
    """Return a mixture of the colours `a` and `b`; `share` (0 to 1) is the fraction of `b`."""
    pairs = zip(channels(a), channels(b), strict=True)
    return "#" + "".join(f"{round(x + (y - x) * share):02x}" for x, y in pairs)


def channels(colour: str) -> tuple[int, int, int]:
    """Return red, green and blue of a colour #rrggbb, each from 0 to 255."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return red, green, blue


def ink_on(colour: str) -> str:
    """Return the text colour with more contrast on `colour`: white or `INK`."""
    red, green, blue = channels(colour)
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 150 else "#ffffff"


COMPUTE, TRANSFER, WAIT = "#44aa99", "#88ccee", "#cc6677"
# Name of a stream or of an item of memory -> colour.
MEANINGS = {
    "compute": COMPUTE, "transfer": TRANSFER, "wait": WAIT,
    # items of memory
    "optimizer": "#661100", "LM head and loss": "#aa4499",
    "layer inputs": "#aaaa00", "attention store": "#117733", "between layers": "#99ddff",
    "weight gradients of a layer": "#ee8866", "attention half": COMPUTE, "MLP half": "#882255",
    "ring buffers": TRANSFER,
}  # fmt: skip

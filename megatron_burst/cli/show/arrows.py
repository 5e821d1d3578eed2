"""How a hop looks in a picture of a schedule: an arrow, filled where rows of its chunk travel.

Copies have the full colour of their owner, gradients a light one, and partial outputs a light one
with stripes; a hop that blocks has a red edge.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import Polygon, Rectangle
from matplotlib.transforms import Bbox

from .colours import WARN, mixed

TIP = 0.09  # of an arrow, in steps
LEFT_OUT = {"edgecolor": "#9ca3af", "linewidth": 0.6, "linestyle": (0, (2, 2))}


@dataclass(frozen=True)
class Looks:
    """Of one hop: the outline that stands for the whole chunk, and where rows travel."""

    outline: dict[str, Any]
    filled: str  # colour
    stripes: str | None  # colour


class Place(NamedTuple):
    """Where an arrow lies, in the coordinates of its axes."""

    begin: float
    end: float
    y: float
    high: float


def looks(colour: str, family: str, blocks: bool) -> Looks:
    """colour: the owner's."""
    outline = {
        "edgecolor": WARN if blocks else colour,
        "linewidth": 1.3 if blocks else 0.7,
    }
    if family in ("kv", "query"):
        return Looks(outline, colour, None)
    stripes = mixed(colour, "#ffffff", 0.5) if family == "out" else None
    return Looks(outline, mixed(colour, "#ffffff", 0.85 if stripes else 0.62), stripes)


def draw(
    axes: Axes, place: Place, look: Looks, shares: Iterable[tuple[float, float]]
) -> list[Bbox]:
    """Draw a hop of these rows, (first, stop) from 0 to 1; where it is filled."""
    begin, end, y, high = place
    outline = axes.add_patch(_arrow(place, facecolor="white", edgecolor="none"))
    ends = [[begin + (end - begin) * x for x in share] for share in shares]
    for left, right in ends:
        filled = Rectangle((left, y), right - left, high, facecolor=look.filled, linewidth=0,
                           edgecolor=look.stripes or "none",
                           hatch="/////" if look.stripes else None)  # fmt: skip
        axes.add_patch(filled)
        filled.set_clip_path(outline)
    axes.add_patch(_arrow(place, facecolor="none", **look.outline))
    return [Bbox.from_extents(left, y, right, y + high) for left, right in ends]


def draw_left_out(axes: Axes, place: Place) -> None:
    """Draw a hop that is not made."""
    axes.add_patch(_arrow(place, facecolor="none", **LEFT_OUT))


def _arrow(place: Place, **looks: Any) -> Polygon:
    """A bar with a point at its right end."""
    begin, end, y, high = place
    right, low = end - min(TIP, (end - begin) / 2), y + high
    corners = [(begin, y), (right, y), (end, y + high / 2), (right, low), (begin, low)]
    return Polygon(corners, **looks)

# SPDX-License-Identifier: Apache-2.0
"""Drawing with matplotlib: figures with a title, and bars and arrows in lanes over time.

A lane is a horizontal strip of a picture, such as the strip of one rank. `show`, `memory` and
`trace` use this module. Files are small and reproducible: they depend only on the figure and the
version of matplotlib.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Patch, Polygon, Rectangle
from matplotlib.textpath import TextPath
from matplotlib.transforms import Bbox
from PIL import Image

from ...units import HOUR, MINUTE
from .show.colours import GREY, INK, RULE, ink_on

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
    "svg.hashsalt": "megatron_burst",
}
DPI = 120
# Units of a time axis: (units per second, name, shortest time in seconds).
CLOCKS = (
    (1 / HOUR, "hours", 2 * HOUR), (1 / MINUTE, "minutes", 2 * MINUTE), (1.0, "seconds", 10),
    (1e3, "milliseconds", 0),
)  # fmt: skip
SHADES = 96  # colours of a file with flat areas and antialiased edges
ALL_SHADES = 256  # colours of a file in which some colours fill only a small area
TIP = 0.09  # length of an arrow's tip, in units of time
MEAN = {"color": INK, "linewidth": 0.9, "linestyle": (0, (4, 3))}  # style of mean lines
DASHED = {"edgecolor": "#9ca3af", "linewidth": 0.6, "linestyle": (0, (2, 2))}


# --- figures -------------------------------------------------------------------------------


@contextmanager
def styled() -> Iterator[None]:
    """Use the style of this package's pictures for matplotlib in this context."""
    with style.context(["default", STYLE], after_reset=True):
        yield


def save(figure: Figure, path: Path, shades: int = SHADES) -> None:
    """Write a figure as a PNG with a palette, or as an SVG if the name ends in .svg.

    Files have no metadata, because metadata would differ between versions of matplotlib.

    Args:
        figure: Figure to write.
        path: Path of the file.
        shades: Number of colours of a PNG's palette.
    """
    if path.suffix == ".svg":
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
        return
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    picture = Image.open(buffer).convert("RGB")
    dither = Image.Dither.NONE
    picture.quantize(shades, method=Image.Quantize.MEDIANCUT, dither=dither).save(
        path, format="png", optimize=True
    )


def headed(
    width: float, height: float, title: str, subtitle: str, lines: Sequence[str] = ()
) -> Figure:
    """Return a figure with a title at the top, a caption at the bottom, and no axes.

    Args:
        width: Width in inches.
        height: Height in inches.
        title: Title, in bold.
        subtitle: Line below the title.
        lines: Lines of the caption.
    """
    figure = Figure(figsize=(width, height))
    left = 0.3 / width
    figure.text(left, 1 - 0.36 / height, title, fontsize=13, fontweight="bold")
    figure.text(left, 1 - 0.62 / height, subtitle, fontsize=9.5, color=GREY)
    for i, line in enumerate(lines):
        y = (0.2 + 0.19 * (len(lines) - 1 - i)) / height
        figure.text(left, y, line, fontsize=9, color=INK)
    return figure


def box(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    """Add axes to a figure and return them; `left`, `bottom` and size are in inches."""
    w, h = figure.get_size_inches()
    return figure.add_axes((left / w, bottom / h, width / w, height / h))


def inches(text: str, size: float) -> float:
    """Return the width of a text in inches.

    Args:
        text: The text. It is bold if `size` is above 12.
        size: Size of the text in points.
    """
    font = FontProperties(family="DejaVu Sans", weight="bold" if size > 12 else "normal")
    return TextPath((0, 0), text, size=size, prop=font).get_extents().width / 72


# --- axes ----------------------------------------------------------------------------------


def clock(axes: Axes, end: float, title: str = "") -> float:
    """Make the x axis below the lanes a time axis from 0 to `end` seconds.

    Args:
        axes: Axes to draw on.
        end: End of the axis in seconds.
        title: Title of the axes.

    Returns:
        Number of axis units per second, for example 1000 if the unit is milliseconds. Bars must be
            drawn in axis units.
    """
    scale, unit = next((s, unit) for s, unit, least in CLOCKS if end >= least)
    axes.set_xlim(0, scale * end)
    axes.set_xlabel(unit, color=GREY, loc="left", labelpad=1)
    if title:
        axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK, pad=17)
    axes.tick_params(length=0, colors=INK)
    axes.spines["bottom"].set_color(RULE)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return scale


def name_lanes(axes: Axes, places: Sequence[float], names: Sequence[str], depth: float) -> None:
    """Write the names of lanes beside the y axis, which points downwards.

    Args:
        axes: Axes to draw on.
        places: y coordinate of each lane.
        names: Name of each lane.
        depth: y coordinate at which the last lane ends.
    """
    axes.set_ylim(depth, -0.1)
    axes.set_yticks(places, names)


def legend(
    axes: Axes,
    entries: Iterable[tuple[str, str]],
    alphas: Mapping[str, float] | None = None,
    above: float = -0.015,
) -> None:
    """Draw a legend of bar colours in one line, above the axes at the right.

    Args:
        axes: Axes to draw on.
        entries: Pairs (colour, label).
        alphas: Label -> opacity of its colour; default 1.
        above: Distance above the axes, as a fraction of the axes' height.
    """
    patches = [
        Patch(color=colour, label=label, alpha=(alphas or {}).get(label), linewidth=0)
        for colour, label in entries
    ]
    axes.legend(handles=patches, loc="lower right", bbox_to_anchor=(1.0, 1 + above), frameon=False,
                ncols=len(patches), fontsize=8, handlelength=1.0, columnspacing=1.3,
                borderaxespad=0.2)  # fmt: skip


# --- bars ----------------------------------------------------------------------------------


def bars(
    axes: Axes,
    top: float,
    high: float,
    spans: Sequence[tuple[float, float]],
    colours: Sequence[str] | str,
    texts: Sequence[str] = (),
    *,
    least: float = 0.0,
    size: float = 8.5,
    edge: str = "white",
    width: float = 0.6,
    alpha: float | None = None,
) -> None:
    """Draw the bars of one lane.

    Args:
        axes: Axes to draw on.
        top: y coordinate of the bars' upper edge.
        high: Height of the bars.
        spans: x coordinates at which each bar starts and stops.
        colours: Colour of each bar, or one colour for all bars.
        texts: Text in the middle of each bar; "" for no text.
        least: Length of the shortest bar in which a text is written.
        size: Size of the texts in points.
        edge: Colour of the lines around bars.
        width: Width of the lines around bars in points.
        alpha: Opacity of the bars.
    """
    extents = [(start, stop - start) for start, stop in spans]
    axes.broken_barh(
        extents, (top, high), facecolors=colours, edgecolor=edge, linewidth=width, alpha=alpha
    )
    for i, text in enumerate(texts):
        start, long = extents[i]
        if text and long >= least:
            ink = ink_on(colours if isinstance(colours, str) else colours[i])
            axes.text(start + long / 2, top + high / 2, text, ha="center", va="center_baseline",
                      fontsize=size, color=ink)  # fmt: skip


def work_bars(
    axes: Axes, places: Sequence[float], work: Sequence[int], colours: Any, high: float, most: int
) -> None:
    """Draw the work of each rank as a bar beside the rank's lane, and the mean as a dashed line.

    Args:
        axes: Axes to draw on.
        places: y coordinates of the lanes.
        work: Work of each rank, in visible pairs.
        colours: Colours of the bars.
        high: Height of a bar.
        most: Maximum work, which sets the width of the x axis.
    """
    axes.barh(places, work, height=high, color=colours)
    axes.axvline(sum(work) / len(work), **MEAN)
    axes.set_xlim(0, max(most, 1) * 1.02)


# --- arrows --------------------------------------------------------------------------------


class ArrowLook(NamedTuple):
    """Style of an arrow.

    Attributes:
        edge: Colour of the outline.
        width: Width of the outline in points.
        filled: Colour of the filled parts of the arrow.
        stripes: Colour of stripes on the filled parts, or None.
    """

    edge: str
    width: float
    filled: str
    stripes: str | None


def arrow(
    axes: Axes, place: Bbox, look: ArrowLook, shares: Iterable[tuple[float, float]]
) -> list[Bbox]:
    """Draw an arrow with filled ranges along its length.

    Args:
        axes: Axes to draw on.
        place: Bounding box of the arrow, in the coordinates of the axes.
        look: Style of the arrow.
        shares: Filled ranges (first, stop), as fractions of the arrow's length.

    Returns:
        Bounding boxes of the filled ranges.
    """
    outline = axes.add_patch(_outline(place, facecolor="white", edgecolor="none"))
    filled = [Bbox.from_extents(place.x0 + place.width * first, place.y0,
                                place.x0 + place.width * stop, place.y1)
              for first, stop in shares]  # fmt: skip
    for part in filled:
        patch = Rectangle((part.x0, part.y0), part.width, part.height, facecolor=look.filled,
                          linewidth=0, edgecolor=look.stripes or "none",
                          hatch="/////" if look.stripes else None)  # fmt: skip
        axes.add_patch(patch)
        patch.set_clip_path(outline)
    axes.add_patch(_outline(place, facecolor="none", edgecolor=look.edge, linewidth=look.width))
    return filled


def dashed_arrow(axes: Axes, place: Bbox) -> None:
    """Draw a dashed arrow, for a transfer that the schedule omits."""
    axes.add_patch(_outline(place, facecolor="none", **DASHED))


def _outline(place: Bbox, **looks: Any) -> Polygon:
    """Return the outline of an arrow: a bar with a tip at the right end."""
    (left, top), (end, low) = place.get_points()
    right = end - min(TIP, (end - left) / 2)
    corners = [(left, top), (right, top), (end, (top + low) / 2), (right, low), (left, low)]
    return Polygon(corners, **looks)

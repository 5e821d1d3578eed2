"""Figures with a title and a caption, and axes placed in inches, for all pictures."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

from . import words
from .colours import GREY, INK


def headed(width: float, height: float, scene: words.Scene, numbers: bool = True) -> Figure:
    """A figure of this size in inches, with the scene's title and, at the foot, its caption."""
    figure = Figure(figsize=(width, height))
    left = 0.3 / width
    figure.text(left, 1 - 0.36 / height, words.title(scene), fontsize=13, fontweight="bold")
    figure.text(left, 1 - 0.62 / height, words.subtitle(scene), fontsize=9.5, color=GREY)
    lines = words.caption(scene) if numbers else []
    for i, line in enumerate(lines):
        y = (0.2 + 0.19 * (len(lines) - 1 - i)) / height
        figure.text(left, y, line, fontsize=9, color=INK)
    return figure


def box(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    """Axes of this place and size, in inches from the lower left corner."""
    w, h = figure.get_size_inches()
    return figure.add_axes((left / w, bottom / h, width / w, height / h))


def inches(text: str, size: float) -> float:
    """The width of a text of this size in points; titles are bold."""
    font = FontProperties(family="DejaVu Sans", weight="bold" if size > 12 else "normal")
    return TextPath((0, 0), text, size=size, prop=font).get_extents().width / 72

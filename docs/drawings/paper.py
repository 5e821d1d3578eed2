"""Figures with a title and a subtitle, and axes placed in inches."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_burst.plugins.tools.show.colours import GREY


def figure(width: float, height: float, title: str, subtitle: str) -> Figure:
    """Return a figure with a title and a subtitle; sizes in inches."""
    made = Figure(figsize=(width, height))
    made.text(0.3 / width, 1 - 0.36 / height, title, fontsize=13, fontweight="bold")
    made.text(0.3 / width, 1 - 0.62 / height, subtitle, fontsize=9.5, color=GREY)
    return made


def box(made: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    """Add axes to a figure; position and size in inches, from the lower left corner."""
    w, h = made.get_size_inches()
    return made.add_axes((left / w, bottom / h, width / w, height / h))

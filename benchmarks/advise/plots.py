"""Predicted against published: one panel per table, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from .section import Section, spread

INK, RULE, BLUE, BAND = "#1f2937", "#d1d5db", "#1d4ed8", "#e0e7ff"
STYLE: dict[Any, Any] = {
    "font.size": 10, "axes.edgecolor": RULE, "axes.labelcolor": INK, "text.color": INK,
    "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False, "axes.spines.right": False,
}  # fmt: skip
NEAR = 0.10  # the band around the diagonal
COLUMNS = 3


def draw(sections: Sequence[Section], path: Path) -> None:
    """Write the PNG: a panel for every section that has points."""
    shown = [section for section in sections if section.points]
    if not shown:
        return
    lines = -(-len(shown) // COLUMNS)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(lines, COLUMNS, figsize=(13, 4.4 * lines + 0.6), squeeze=False)
        for axis in axes.flat[len(shown) :]:
            axis.axis("off")
        for axis, section in zip(axes.flat, shown, strict=False):
            _panel(axis, section)
        figure.suptitle("Predicted against published or measured; the band is 10 % wide each way",
                        x=0.012, ha="left", fontsize=13, weight="bold")  # fmt: skip
        figure.tight_layout(rect=(0, 0, 1, 0.985), h_pad=2.2, w_pad=2.0)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110, metadata={"Software": None})
        plt.close(figure)


def _steps(ends: np.ndarray) -> tuple[float, ...]:
    """Of each decade, where to write numbers."""
    decades = np.log10(ends[1] / ends[0])
    return (1.0,) if decades > 2.5 else (1.0, 2.0, 5.0) if decades > 0.7 else tuple(range(1, 10))


def _number(value: float, _: object) -> str:
    """Tokens, which are the only large numbers, in millions."""
    return f"{value / 1e6:g}M" if value >= 1e5 else f"{value:g}"


def _panel(axis: Axes, section: Section) -> None:
    there = np.array([point.published for point in section.points], dtype=float)
    here = np.array([point.predicted for point in section.points], dtype=float)
    ends = np.array([min(there.min(), here.min()) / 1.3, max(there.max(), here.max()) * 1.3])
    axis.fill_between(ends, (1 - NEAR) * ends, (1 + NEAR) * ends, color=BAND, linewidth=0)
    axis.plot(ends, ends, color=RULE, linewidth=1)
    axis.scatter(there, here, s=16, color=BLUE, alpha=0.45, linewidth=0, zorder=3)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlim(*ends)
    axis.set_ylim(*ends)
    for each in (axis.xaxis, axis.yaxis):
        each.set_major_locator(LogLocator(subs=_steps(ends)))
        each.set_major_formatter(FuncFormatter(_number))
        each.set_minor_locator(NullLocator())
    title = "\n".join(wrap(section.title, 42))
    axis.set_title(title, loc="left", fontsize=10.5, weight="bold")
    axis.set_xlabel(section.unit)
    axis.set_ylabel("predicted")
    off = spread(section.points)
    words = (
        f"{len(there)} points\nmedian {off.median:.1%}\np90 {off.p90:.1%}\nworst {off.worst:.0%}"
    )
    axis.text(0.04, 0.96, words, transform=axis.transAxes, va="top", fontsize=9)

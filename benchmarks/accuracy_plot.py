"""The picture of `accuracy.py`: error over the number of ranks, one panel per tensor.

Owns the look of that picture and nothing else: everything it shows arrives as arguments.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only: no display is needed or opened
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

INK, GREY, RULE = "#1f2430", "#6b7280", "#e5e7eb"
NAMES = ("out", "dq", "dk", "dv")
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": GREY,
    "axes.edgecolor": "#9ca3af",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": GREY,
    "ytick.color": GREY,
}


def draw(
    path: Path,
    errors: Mapping[tuple[str, str, str, int], Sequence[Sequence[float]]],
    rows: Sequence[tuple[str, str]],
) -> None:
    """Write the PNG.

    errors: (dtype, heads, variant, ranks) -> per seed, relative RMS of out, dq, dk, dv first;
    ranks 0 stands for a variant that knows none. rows: the (dtype, heads) to show, one row each.
    """
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            len(rows), len(NAMES), figsize=(12, 3.1 * len(rows) + 1), sharex=True, squeeze=False
        )
        for line, (dtype, heads) in zip(axes, rows, strict=True):
            mine = {k[2:]: v for k, v in errors.items() if k[:2] == (dtype, heads)}
            for column, axis in enumerate(line):
                _panel(axis, mine, column, dtype)
                axis.set_title(f"{NAMES[column]}   ({dtype}, {heads} heads)", loc="left")
        for axis in axes[-1]:
            axis.set_xlabel("context-parallel ranks")
        for axis in axes[:, 0]:
            axis.set_ylabel("relative RMS error, in 1e-3")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.suptitle("Error against float64", x=0.01, ha="left", fontsize=14, weight="bold")
        figure.legend(handles, labels, loc="lower center", ncols=3, frameon=False)
        figure.tight_layout(rect=(0, 0.11 if len(rows) > 1 else 0.2, 1, 0.99))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130, metadata={"Software": None})
        plt.close(figure)


def _panel(axis: Axes, errors: Mapping, column: int, dtype: str) -> None:
    ranks = sorted({count for _, count in errors if count})
    axis.grid(axis="y", which="both", color=RULE)
    for variant, look in _looks(dtype).items():
        points = {count: [seed[column] for seed in seeds]
                  for (name, count), seeds in errors.items() if name == variant}  # fmt: skip
        if 0 in points:
            points = dict.fromkeys(ranks, points[0])
        values = [statistics.median(points[count]) for count in ranks]
        axis.plot(ranks, values, label=look.pop("label"), **look)
        low, high = ([f(points[count]) for count in ranks] for f in (min, max))
        axis.fill_between(ranks, low, high, color=look["color"], alpha=0.15, linewidth=0)
    axis.set_xscale("log", base=2)
    axis.set_xticks(ranks, [str(count) for count in ranks])
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{1e3 * y:.1f}"))


def _looks(dtype: str) -> dict[str, dict]:
    """How each variant is drawn; both sides of one wire share a colour."""
    blue, green, red = "#1d4ed8", "#059669", "#dc2626"
    looks: dict[str, dict] = {
        "one device": {"color": GREY, "linestyle": "--", "label": "torch on one device"}
    }
    for wire, colour in (("fp32", blue), (dtype, green)):
        for side, line, marker in (("kv", "-", "o"), ("query", ":", "s")):
            label = f"ours, {wire} wire, side {side}"
            style = {"color": colour, "linestyle": line, "marker": marker, "markersize": 4}
            looks[f"{wire} wire, side {side}"] = {**style, "label": label}
    style = {"color": red, "linestyle": "-", "marker": "^", "markersize": 5}
    looks["emulated 16-bit ring"] = {
        **style,
        "label": f"adding in {dtype} from hop to hop (emulated)",
    }
    return looks

"""Picture of `make quickstart`: the losses of the runs and their differences.

The module defines the style of the pictures of all examples. All data are arguments.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # files only: no display is needed or opened
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, NullLocator

INK, GREY, RULE = "#1f2430", "#6b7280", "#e5e7eb"
BURST, ONE_RANK, RESUMED = "#1d4ed8", "#ea580c", "#059669"
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10.5,
    "text.color": INK,
    "axes.labelcolor": GREY,
    "axes.edgecolor": "#9ca3af",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "legend.facecolor": "white",
    "legend.edgecolor": "white",
    "legend.framealpha": 1.0,
}
FLOOR = 1e-9  # smaller differences, including 0, are drawn here; the tick label is 0

WINDOW = 11  # steps; losses of different texts differ by more than the progress of one step

Curve = Mapping[int, float]  # step -> value


def draw(
    path: Path,
    *,
    losses: Mapping[str, Curve],
    differences: Mapping[str, Curve],
    entropy: float,
    tolerance: float,
    title: str,
    subtitle: str,
    caption: str,
) -> None:
    """Write the PNG.

    Args:
        path: The PNG.
        losses: Nats per token by step, for "burst", "one_rank" and "resumed".
        differences: Relative differences by step; labels begin with the name of the run.
        entropy: Unigram entropy of the data in nats per token.
        tolerance: Largest relative difference that passes.
        title: Title.
        subtitle: Line below the title.
        caption: Text below the panels.
    """
    with plt.rc_context(STYLE):
        figure, (top, bottom) = plt.subplots(
            2, 1, figsize=(9.6, 7.0), height_ratios=(2.5, 1), sharex=True, dpi=160
        )
        figure.subplots_adjust(left=0.085, right=0.965, top=0.865, bottom=0.165, hspace=0.1)
        _loss_panel(top, losses, entropy)
        _difference_panel(bottom, differences, tolerance)
        figure.align_ylabels()
        figure.text(0.085, 0.945, title, fontsize=15, fontweight="bold")
        figure.text(0.085, 0.908, _shorten(subtitle, 112), fontsize=10, color=GREY)
        note = "\n".join(textwrap.wrap(caption, 122))
        figure.text(
            0.085, 0.068, note, fontsize=7.6, color=GREY, va="top", family="DejaVu Sans Mono"
        )
        figure.savefig(path)
        plt.close(figure)


def _loss_panel(axes: Axes, losses: Mapping[str, Curve], entropy: float) -> None:
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.axhline(entropy, color=GREY, linewidth=1.1, linestyle=(0, (5, 3)), zorder=1)
    burst = losses["burst"]
    smooth = {"color": BURST, "alpha": 0.22, "linewidth": 5, "solid_capstyle": "round"}
    axes.plot(*_points(_smoothed(burst)), **smooth, label=f"mean over {WINDOW} steps")
    axes.plot(*_points(burst), color=BURST, linewidth=1.3, label="BurstAttention, 4 ranks as 2 x 2")
    ring = {"linestyle": "none", "marker": "o", "markersize": 6, "markerfacecolor": "white"}
    axes.plot(
        *_points(losses["one_rank"]),
        **ring,
        color=ONE_RANK,
        markeredgewidth=1.5,
        label="Megatron's own attention, 1 rank",
    )
    axes.plot(
        *_points(losses["resumed"]),
        **ring | {"marker": "D", "markersize": 5},
        color=RESUMED,
        markeredgewidth=1.5,
        label="resumed from the checkpoint on 2 ranks, striped",
    )
    last = max(burst)
    axes.annotate(
        f"unigram entropy of the text: {entropy:.2f}",
        (last, entropy),
        xytext=(0, 5),
        textcoords="offset points",
        ha="right",
        color=GREY,
        fontsize=9.5,
    )
    axes.set_ylabel("loss, nats per token")
    handles, labels = axes.get_legend_handles_labels()
    order = [1, 0, 2, 3]  # the run, its mean, then the runs that are compared with it
    axes.legend(
        [handles[i] for i in order],
        [labels[i] for i in order],
        loc="upper right",
        labelspacing=0.45,
    )


def _difference_panel(axes: Axes, differences: Mapping[str, Curve], tolerance: float) -> None:
    axes.set_yscale("log")
    axes.set_ylim(FLOOR / 2, tolerance * 8)
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.axhline(tolerance, color=GREY, linewidth=1.1, linestyle=(0, (5, 3)))
    for label, curve in differences.items():
        color = ONE_RANK if label.startswith("1 rank") else RESUMED
        filled = "loss" in label
        axes.plot(
            *_points({step: max(value, FLOOR) for step, value in curve.items()}),
            color=color,
            linewidth=1,
            marker="o" if filled else "s",
            markersize=4,
            markerfacecolor=color if filled else "white",
            label=label,
        )
    axes.annotate(
        f"allowed: {_power(tolerance)}",
        (0.0, tolerance),
        xycoords=("axes fraction", "data"),
        xytext=(6, 4),
        textcoords="offset points",
        color=GREY,
        fontsize=9.5,
    )
    decades = range(-8, round(math.log10(tolerance)) + 1, 2)
    axes.set_yticks(
        [FLOOR, *(10.0**n for n in decades)], ["0", *(_power(10.0**n) for n in decades)]
    )
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel("relative difference")
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.legend(loc="center", ncols=1, fontsize=9, labelspacing=0.35)


def _smoothed(curve: Curve) -> dict[int, float]:
    """Return centered means over WINDOW steps; steps at the ends have none."""
    half = WINDOW // 2
    return {
        step: sum(curve[step + i] for i in range(-half, half + 1)) / WINDOW
        for step in curve
        if step - half in curve and step + half in curve
    }


def _power(value: float) -> str:
    """Return a power of ten with a raised exponent."""
    return f"$10^{{{round(math.log10(value))}}}$"


def _shorten(text: str, length: int) -> str:
    """Return `text`, without its middle if it is longer than `length`."""
    half = (length - 5) // 2
    return text if len(text) <= length else f"{text[:half]} ... {text[-half:]}"


def _points(curve: Curve) -> tuple[list[int], list[float]]:
    steps = sorted(curve)
    return steps, [curve[step] for step in steps]

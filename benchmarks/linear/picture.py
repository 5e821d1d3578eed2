"""The picture: seconds of a layer's communication by tokens per rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from . import summary
from .settings import ALL_TO_ALL, GATHER
from .summary import Record

TOKENS = [1024 * 2**i for i in range(7)]
LOOKS = {
    ALL_TO_ALL: ("#626d7d", "-"), GATHER: ("#c9a45c", "-"), "ring": ("#b9bec6", "--"),
    "all_gather": ("#76b900", "--"), "two_level": ("#4a7fb5", "--"), "scan": ("#c8452e", "-"),
}  # fmt: skip


def draw(cells: Sequence[Record], path: Path) -> None:
    """Large states, one panel per form, contiguous; points are measured, lines are by bytes."""
    shown = [cell for cell in cells if any(r["name"] == ALL_TO_ALL for r in cell["rivals"])]
    shown = [c for c in shown if c["setting"]["layout"] == "contiguous"] or shown
    if not shown:
        return
    figure, axes = plt.subplots(
        1, len(shown), figsize=(4.2 * len(shown) + 1.4, 3.8), sharey=True, squeeze=False
    )
    for axis, cell in zip(axes[0], shown, strict=True):
        _panel(axis, cell)
    axes[0][0].set_ylabel("seconds, forward + backward")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="center right", frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0, 1 - 1.9 / figure.get_figwidth(), 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _panel(axis: plt.Axes, cell: Record) -> None:
    setting = summary.setting_of(cell)
    for rival in cell["rivals"]:
        if rival["name"] not in LOOKS:
            continue
        colour, style = LOOKS[rival["name"]]
        seconds = median(summary.totals(rival))
        grows = rival["name"] == ALL_TO_ALL
        line = [seconds * (tokens / setting.tokens if grows else 1.0) for tokens in TOKENS]
        axis.plot(TOKENS, line, style, color=colour, linewidth=1.6, label=rival["name"])
        axis.plot([setting.tokens], [seconds], "o", color=colour, markersize=5)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(TOKENS, [f"{tokens // 1024}K" for tokens in TOKENS])
    axis.set_xlabel("tokens per rank")
    axis.set_title(f"{setting.form} decay" if setting.form != "matrix" else "gated delta rule",
                   fontsize=10)  # fmt: skip
    axis.grid(True, which="major", color="#e4e4e4", linewidth=0.6)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)

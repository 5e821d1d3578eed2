"""Tables and one chart of simulated results. This module runs nothing."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import markdown

from .forecast import METHODS
from .setting import LENGTHS

Steps = list[dict[str, Any]]
COLOURS = {
    "flat": "#b9bec6", "whole": "#8d96a3", "rows": "#626d7d", "pack": "#d8c8a8",
    "fixed": "#c9a45c", "dynamic": "#76b900", "flexsp": "#4a7fb5", "balanced": "#c8452e",
}  # fmt: skip


def shown(results: dict[str, Any]) -> str:
    """Return tables of tokens per second, one for each number of ranks."""
    sizes = sorted({step["ranks"] for step in results["steps"]})
    parts = [_table([s for s in results["steps"] if s["ranks"] == ranks], ranks) for ranks in sizes]
    return "\n\n".join(parts)


def _table(steps: Steps, ranks: int) -> str:
    rows = []
    for method, name in METHODS.items():
        cells = [_cell([s for s in steps if s["method"] == method and s["lengths"] == kind.name])
                 for kind in LENGTHS]  # fmt: skip
        if any(cells):
            rows.append([name, *(cell or "-" for cell in cells)])
    rows.append(["documents in a pack: ideal", *(_ideal(steps, kind.name) for kind in LENGTHS)])
    batches = len({step["seed"] for step in steps})
    head = f"**{ranks:,} ranks**, batches: up to {batches}; in brackets the share of the ideal."
    table = markdown(["tokens per second and GPU", *(kind.name for kind in LENGTHS)], rows)
    return f"{head}\n\n{table}"


def _cell(steps: Steps) -> str:
    if not steps:
        return ""
    rates = [step["rate"] for step in steps]
    spread = f" [{min(rates):,.0f}, {max(rates):,.0f}]" if len(rates) > 1 else ""
    return f"{median(rates):,.0f}{spread} ({median(map(_share, steps)):.2f})"


def _share(step: dict[str, Any]) -> float:
    return step["ideal"] / step["layer"]


def _ideal(steps: Steps, kind: str) -> str:
    rates = {s["seed"]: s["rate"] / _share(s) for s in steps if s["lengths"] == kind}
    return f"{median(rates.values()):,.0f}" if rates else "-"


def draw(steps: Steps, path: Path) -> None:
    """Draw bars of every method's share of the ideal speed."""
    from matplotlib.figure import Figure

    sizes = sorted({step["ranks"] for step in steps})
    figure = Figure(figsize=(11, 1.5 + 2.4 * len(sizes)), layout="constrained")
    axes = figure.subplots(len(sizes), 1, sharex=True, squeeze=False)[:, 0]
    width = 0.9 / len(METHODS)
    for ax, ranks in zip(axes, sizes, strict=True):
        for index, (method, name) in enumerate(METHODS.items()):
            shares = [
                [_share(s) for s in steps
                 if (s["ranks"], s["method"], s["lengths"]) == (ranks, method, kind.name)] or [0.0]
                for kind in LENGTHS
            ]  # fmt: skip
            middle = [median(kind_shares) for kind_shares in shares]
            reach = [[m - min(e) for m, e in zip(middle, shares, strict=True)],
                     [max(e) - m for m, e in zip(middle, shares, strict=True)]]  # fmt: skip
            places = [x + (index - (len(METHODS) - 1) / 2) * width for x in range(len(LENGTHS))]
            ax.bar(places, middle, 0.92 * width, yerr=reach, color=COLOURS[method], label=name)
        ax.set_ylim(0, 1.05)
        ax.set_ylabel(f"{ranks:,} ranks\nshare of the ideal")
        ax.grid(axis="y", alpha=0.3)
        ax.set_axisbelow(True)
    axes[-1].set_xticks(range(len(LENGTHS)), [kind.name for kind in LENGTHS])
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    figure.savefig(path, dpi=110)

"""Tables of simulated results. This module runs nothing."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.report import markdown

from .forecast import METHODS
from .setting import LENGTHS

Steps = list[dict[str, Any]]


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

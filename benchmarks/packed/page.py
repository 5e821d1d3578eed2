"""The section of the documentation, and its picture, from what was simulated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.report import markdown, write_section

from .forecast import METHODS
from .scaling import PUBLISHED, RANKS, TOKENS
from .setting import LENGTHS, Setting, assumptions

Steps = list[dict[str, Any]]
COLOURS = {
    "flat": "#b9bec6", "whole": "#8d96a3", "rows": "#626d7d", "pack": "#d8c8a8",
    "fixed": "#c9a45c", "dynamic": "#76b900", "flexsp": "#4a7fb5", "balanced": "#c8452e",
}  # fmt: skip


def write(known: dict[str, Any], setting: Setting, out: Path) -> None:
    """Replace the section `packed` of performance.md, and draw packed.png."""
    steps: Steps = known["steps"]
    parts = [
        f"Nothing here was measured: `python -m benchmarks.packed` simulates with the package's "
        "own schedules what `auto` would predict. "
        f"{setting.tokens // 1024}K tokens per rank, nodes of {setting.per_node}. **Assumed:**",
        markdown(["what", "value"], [list(each) for each in assumptions(setting)]),
    ]
    sizes = sorted({step["ranks"] for step in steps})
    for ranks in sizes:
        parts += [_table([step for step in steps if step["ranks"] == ranks], ranks)]
    if steps:
        draw(steps, sizes, out / "packed.png")
        parts += ["![Share of the ideal speed](packed.png)", NOTES]
    if "scaling" in known:
        parts += [_scaling(known["scaling"])]
    opening = "# Performance"
    write_section(out / "performance.md", "packed", "\n\n".join(parts), opening)


NOTES = """*Ideal*: every rank equally busy at the assumed rates, links free and no launches. In a
column are medians over batches [lowest, highest]. Of *zigzag per document* and of groups documents
are taken as liquid: what they lose by padding to multiples of 2 x ranks, and by kernels on pieces
of a few rows, is not counted, which at 256 ranks and more is unreal for short documents. A rank
holds at most its share of tokens in any method, so methods with groups take two micro-batches or
more. *Groups of one size* are what is run today: as many ranks as hold the longest length of the
distribution (none, where that is more than there are), batches dealt out in the order of the
documents. *Megatron's default_dynamic_cp* is its dev branch's rule, by length squared over ranks.
*Groups of FlexSP's kind* know the simulator's times; their search takes seconds to minutes for a
batch, layout balanced milliseconds. `auto` tries multicast, all_gather and prefetch, with 1, 2
or 4 chunks of heads. Groups have
up to 256 ranks; where documents of 1M tokens want more (1,024 ranks, median 8K), none is shown.
"-": not simulated, or it cannot run these documents.

**Why.** Without prefetch layout balanced loses a third of attention's speed and more: ranks have
equal work in total but not at every step, and who exchanges step by step waits for the slowest of
every step. With it, what is left open is the time of the rows at the beginning and of gradients at
the end of a pass, which nothing hides; the best groups exchange in even steps and hide it, so they
are ahead where the longest documents reach many ranks. Megatron's rule runs the longest document on
as few ranks as hold it, and all others wait for these."""


def _table(steps: Steps, ranks: int) -> str:
    rows = []
    for method, name in METHODS.items():
        cells = [_cell([s for s in steps if s["method"] == method and s["lengths"] == kind.name])
                 for kind in LENGTHS]  # fmt: skip
        if any(cells):
            rows.append([name, *(cell or "-" for cell in cells)])
    rows.append(["documents in a pack: ideal", *(_ideal(steps, kind.name) for kind in LENGTHS)])
    table = markdown(["tokens per second and GPU", *(kind.name for kind in LENGTHS)], rows)
    batches = len({step["seed"] for step in steps})
    several = "es" * (batches > 1)
    head = (
        f"**{ranks:,} ranks**, up to {batches} batch{several}; in brackets the share of the ideal."
    )
    return f"{head}\n\n{table}"


def _cell(steps: Steps) -> str:
    if not steps:
        return ""
    rates = [step["rate"] for step in steps]
    share = median(step["ideal"] / step["layer"] for step in steps)
    several = f" [{min(rates):,.0f}, {max(rates):,.0f}]" if len(rates) > 1 else ""
    return f"{median(rates):,.0f}{several} ({share:.2f})"


def _ideal(steps: Steps, kind: str) -> str:
    rates = {s["seed"]: s["rate"] * s["layer"] / s["ideal"] for s in steps if s["lengths"] == kind}
    return f"{median(rates.values()):,.0f}" if rates else "-"


def _scaling(scaling: dict[str, Sequence[dict[str, Any]]]) -> str:
    """Speeds beside the published ones."""
    rows = []
    names = {"scaled": "balanced, simulated; documents grow with the pack",
             "same": "balanced, simulated; the same documents, more of them"}  # fmt: skip
    for kind, name in names.items():
        cells = []
        for way in ("forward", "backward"):
            few, many = ([x[way] for x in scaling[kind] if x["ranks"] == ranks] for ranks in RANKS)
            cells.append(f"{median(few):.0f}, {median(many):.0f}: "
                         f"**{median(many) / median(few):.2f}**")  # fmt: skip
        rows.append([name, *cells])
    for name, (f8, f64, b8, b64) in PUBLISHED.items():
        rows.append([f"{name}, published", f"{f8}, {f64}: {f64 / f8:.2f}",
                     f"{b8}, {b64}: {b64 / b8:.2f}"])  # fmt: skip
    table = markdown(["attention, TFLOP/s per GPU at 8 and at 64 GPUs: 64 over 8",
                      "forward", "backward"], rows)  # fmt: skip
    count = len({x["seed"] for x in scaling["scaled"]})
    return (
        f"**Attention alone at 8 and 64 GPUs**, {TOKENS // 1024}K tokens per GPU, packed causal, "
        f"medians over {count} batches; the published ones are read off MagiAttention's chart for "
        "H100, and their documents are not known.\n\n" + table
    )


def draw(steps: Steps, sizes: Sequence[int], path: Path) -> None:
    """Bars: of every method its share of the ideal speed."""
    figure, axes = plt.subplots(
        len(sizes), 1, figsize=(11, 1 + 2.4 * len(sizes)), sharex=True, squeeze=False
    )
    width = 0.9 / len(METHODS)
    for ax, ranks in zip(axes[:, 0], sizes, strict=True):
        for at, method in enumerate(METHODS):
            for x, kind in enumerate(LENGTHS):
                wanted = (ranks, method, kind.name)
                shares = [
                    s["ideal"] / s["layer"]
                    for s in steps
                    if (s["ranks"], s["method"], s["lengths"]) == wanted
                ]
                if shares:
                    place = x + (at - (len(METHODS) - 1) / 2) * width
                    ax.bar(place, median(shares), 0.92 * width, color=COLOURS[method],
                           label=METHODS[method] if x == 0 else None)  # fmt: skip
                    ax.plot([place] * 2, [min(shares), max(shares)], color="black", linewidth=0.8)
        ax.set_ylim(0, 1.05)
        ax.set_ylabel(f"{ranks:,} ranks\nshare of the ideal")
        ax.grid(axis="y", alpha=0.3)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xticks(range(len(LENGTHS)), [kind.name for kind in LENGTHS])
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=2, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 1 - 1 / (1 + 2.4 * len(sizes))))
    figure.savefig(path, dpi=110)
    plt.close(figure)

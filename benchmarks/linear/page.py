"""Tables of what was measured and simulated, for docs/linear-attention.md, and its picture.

Its words are written by hand; `python -m benchmarks.linear` writes the numbers beside the records.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import markdown, spread, write_section

from . import picture, simulated, summary
from .settings import ALGORITHMS, ALL_TO_ALL, ATTENTIONS, CONVOLUTION, GATHER
from .summary import Record

PAGE, PICTURE = "linear-attention.md", "linear-attention.png"
COLUMNS = (ALL_TO_ALL, GATHER, *ALGORITHMS)
Known = dict[str, Any]


def write(known: Known, out: Path) -> None:
    """The tables of what is known, and the picture."""
    parts = {"simulated": simulated.section()}
    if "cluster" in known:
        parts["cluster"] = cluster(known["cluster"])
        picture.draw(known["cluster"]["cells"], out / PICTURE)
    if "hybrid" in known:
        parts["hybrid"] = hybrid(known["hybrid"])
    for part, text in parts.items():
        write_section(out / PAGE, f"linear-{part}", text, "# Linear attention")


def cluster(run: Known) -> str:
    """States on the emulated cluster: seconds, bytes and what `auto` takes."""
    cells = run["cells"]
    over = [summary.auto_over_best(cell).middle for cell in cells]
    return "\n\n".join([
        _measured(run),
        f"`auto` over the fastest of our algorithms: {min(over):.3f} to {max(over):.3f}.",
        "Seconds of forward and backward, medians; ratios are of runs of the same round: median "
        "(smallest to largest).",
        _times(cells),
        "MiB that a rank sends on average in both passes, within its node + between nodes.",
        _bytes(cells), _chosen(cells),
    ])  # fmt: skip


def _times(cells: Sequence[Record]) -> str:
    found = []
    for cell in cells:
        rows = {row.name: row for row in summary.rows(cell)}
        setting = summary.setting_of(cell)
        times = [f"{median(rows[n].total):.3f}" if n in rows else "-" for n in COLUMNS]
        to_all = str(rows["auto"].to_all or "-")
        gain = summary.ratio({n: row.total for n, row in rows.items()}, GATHER, "scan")
        rest = rows.get(CONVOLUTION)
        found.append([
            f"{setting.form}, {setting.layout}", f"{setting.heads} of {setting.width}", *times,
            to_all, f"{gain.middle:.2f} ({gain.least:.2f} to {gain.most:.2f})" if gain else "-",
            f"{median(rest.total):.3f}" if rest else "-",
        ])  # fmt: skip
    heads = ["", "heads", "all-to-all", "torch gather", *ALGORITHMS, "auto / all-to-all",
             "gather / scan", "convolution"]  # fmt: skip
    return markdown(heads, found)


def _bytes(cells: Sequence[Record]) -> str:
    found = []
    for cell in cells:
        rows = {row.name: row for row in summary.rows(cell)}
        setting = summary.setting_of(cell)
        sent = [
            f"{rows[n].bytes['intra']:.2f} + {rows[n].bytes['inter']:.2f}" if n in rows else "-"
            for n in COLUMNS
        ]
        extra = max(max(row.extra.values(), default=0) for n, row in rows.items()
                    if n in (ALL_TO_ALL, GATHER, "ring", "all_gather"))  # fmt: skip
        found.append([f"{setting.form}, {setting.layout}, {setting.heads} of {setting.width}",
                      *sent, f"{extra:.1f} %"])  # fmt: skip
    return markdown(["", "all-to-all", "torch gather", *ALGORITHMS, "headers, at most"], found)


def _chosen(cells: Sequence[Record]) -> str:
    lines = ["What `auto` takes of a pass, at the rates measured in each setting:\n"]
    for cell in cells:
        chosen, scan = (_rival(cell, name)["says"] for name in ("auto", "scan"))
        lines.append(f"- {summary.setting_of(cell).words}: {chosen} (`scan`: {scan}).")
    return "\n".join(lines)


def _rival(cell: Record, name: str) -> Record:
    return next(rival for rival in cell["rivals"] if rival["name"] == name)


def hybrid(run: Known) -> str:
    """The attention of a hybrid stack: seconds, what is exposed, bytes."""
    cells = run["cells"]
    base = ATTENTIONS[0].name
    found = []
    for cell in cells:
        times = {a["name"]: summary.totals(a) for a in cell["attentions"]}
        for a in cell["attentions"]:
            ratio = summary.ratio(times, base, a["name"])
            exposed = median(times[a["name"]]) - a["compute"]
            sent = [sum(a["busiest"][p][link] for p in a["busiest"]) / summary.MIB
                    for link in ("intra", "inter")]  # fmt: skip
            found.append([
                cell["regime"], a["name"], spread(times[a["name"]]), f"{a['compute']:.2f}",
                f"{exposed:.2f}",
                f"{ratio.middle:.2f} ({ratio.least:.2f} to {ratio.most:.2f})" if ratio else "-",
                f"{sent[0]:.0f} + {sent[1]:.0f}", a["says"] or "-",
            ])  # fmt: skip
    heads = ["compute", "attention", "seconds", "of it compute", "exposed", "gain over LASP-2H",
             "MiB within + between", "chosen"]  # fmt: skip
    return f"{_measured(run)}\n\n{markdown(heads, found)}"


def _measured(run: Known) -> str:
    loads = [x for cell in run["cells"] for x in cell["load"]]
    return (
        f"Measured by `{run['command']}` on {run['machine']}, load {min(loads):.0f} to "
        f"{max(loads):.0f}."
    )

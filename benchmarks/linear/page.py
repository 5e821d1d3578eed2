"""The sections of docs/linear-attention.md, from what was measured and simulated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cluster.network import PACKET
from benchmarks.report import human, markdown, spread, write_section

from . import picture, simulated, summary
from .settings import (
    ALGORITHMS,
    ALL_TO_ALL,
    ATTENTIONS,
    CONVOLUTION,
    GATHER,
    LAYERS,
    Stack,
    refusal,
)
from .summary import Record

PAGE, PICTURE = "linear-attention.md", "linear-attention.png"
OPENING = "# Linear attention and state-space layers"
FAR = 64 * 1024  # tokens per rank
COLUMNS = (ALL_TO_ALL, GATHER, *ALGORITHMS)
Known = dict[str, Any]


def write(known: Known, out: Path) -> None:
    """Replace the sections of what is known, and draw the picture."""
    parts = {"simulated": f"### Simulated\n\n{simulated.section()}"}
    if "cluster" in known:
        parts["cluster"] = f"### States on an emulated cluster\n\n{cluster(known['cluster'])}"
        picture.draw(known["cluster"]["cells"], out / PICTURE)
    if "hybrid" in known:
        parts["hybrid"] = f"### The attention of a hybrid stack\n\n{hybrid(known['hybrid'])}"
    for part, text in parts.items():
        write_section(out / PAGE, f"linear-{part}", text, OPENING)


# --- states on the emulated cluster --------------------------------------------------------


def cluster(run: Known) -> str:
    cells = run["cells"]
    first = cells[0]
    size = first["grid"][0] * first["grid"][1]
    large = [c for c in cells if refusal(summary.setting_of(c), ALL_TO_ALL, size) is None]
    small = [c for c in cells if c not in large]
    says = _rival(large[0], ALL_TO_ALL)["says"] if large else "nothing"
    parts = [
        f"{_measured(run)} {first['grid'][0]} nodes of {first['grid'][1]} ranks at "
        f"{first['rates']} bit/s between and within nodes; bf16 activations, fp32 states, batch 1, "
        f"{human(summary.setting_of(first).tokens)} tokens per rank. The all-to-all is that of "
        f"{says}.",
        *(f"- {line}." for line in (*goals(large), *small_goals(small))),
        "Seconds of forward and backward, medians; *auto / all-to-all* and *gather / scan* are "
        "ratios of runs of the same round: median (smallest to largest).",
        _times(large),
        f"![Seconds by tokens per rank]({PICTURE})",
    ]
    if small:
        parts += [
            f"Small states, where {size} ranks cannot share the heads:",
            _times(small),
            _own_words(small),
            _own(small),
        ]
    parts += [
        "MiB that a rank sends on average in both passes, within its node + between nodes, by the "
        "formula; the kernel's counters were held against it, and *headers* is what they say "
        "beyond.",
        _bytes(cells), _chosen(cells), NOTES,
    ]  # fmt: skip
    joined = "\n\n".join(part for part in parts if part)
    return joined.replace(".\n\n- ", ".\n- ").replace("\n- ", "\n\n- ", 1)


NOTES = f"""What crosses in the all-to-all is what Megatron's layers exchange: all that the input \
projection makes ({
    "; ".join(
        f"{kind}: {each.name}, {', '.join(n for n, _ in each.sections)}"
        for kind, each in LAYERS.items()
    )
}) and the output. GLA's is our reading: Megatron has no such layer. Ranks that pass states also \
send each other the rows of the short convolution, three per piece: that is the last column. The \
*limit* is the bytes of the busiest interface at the rate that plain transfers reached. gloo's \
all-gather sends round a ring of all ranks; its time includes that of going through all maps, as \
ours do. Nothing else is computed. Eight ranks share two cores: where messages are small, their \
handling costs more than their bytes."""


def _own_words(cells: Sequence[Record]) -> str:
    """Why `auto` may miss the fastest algorithm of small states here."""
    size = cells[0]["grid"][0] * cells[0]["grid"][1]
    shares = [
        100 * size * row.busy / cell["cores"] / median(row.total)
        for cell in cells for row in summary.rows(cell) if row.name == "two_level"
    ]  # fmt: skip
    state, cores = summary.setting_of(cells[0]).state_bytes, cells[0]["cores"]
    at_once = 2 * PACKET
    free = (
        f"Here links hold back no more than what exceeds {at_once >> 10} KiB, which such a state "
        f"({state >> 10} KiB) does not: time goes into the work of the ranks, of gloo and of the "
        "kernel. "
    )
    return (
        "Milliseconds for which a rank's own thread is busy in both passes, on average. `auto` "
        f"counts links and the start of each exchange. {free if state <= at_once else ''}That of "
        f"{size} ranks' threads on {cores} cores alone is {min(shares):.0f} to {max(shares):.0f} % "
        "of two_level's time, which has the most messages. Whether `auto` is right where links "
        "count, large states show:"
    )


def goals(cells: Sequence[Record]) -> list[str]:
    """The targets, and how far from them."""
    if not cells:
        return []
    rows = [{row.name: row for row in summary.rows(cell)} for cell in cells]
    near = [row["auto"].to_all for row in rows]
    with_rows = [
        (median(row["auto"].total) + (median(row[CONVOLUTION].total) if CONVOLUTION in row else 0))
        / median(row[ALL_TO_ALL].total)
        for row in rows
    ]
    ideal = [median(row["auto"].total) / row[ALL_TO_ALL].limit for row in rows]
    tokens = summary.setting_of(cells[0]).tokens
    far = [each * tokens / FAR for each in ideal]
    faster = [1 / row["scan"].to_gather.middle for row in rows]
    over = [row[ALL_TO_ALL].limit / median(row[ALL_TO_ALL].total) for row in rows]
    return [
        f"**`auto` over the all-to-all of heads** (target: at most 0.1): {_range(near)} of its "
        f"time, {min(with_rows):.3f} to {max(with_rows):.3f} with the convolution's rows; "
        f"{min(ideal):.3f} to {max(ideal):.3f} of the least time that its bytes permit, which it "
        f"misses here ({min(over):.2f} to {max(over):.2f} of the links' rate)",
        f"**At {human(FAR)} tokens per rank** (target: below 0.01), by the all-to-all's bytes at "
        f"full rate and `auto`'s measured time, which has no tokens in it: {min(far):.4f} to "
        f"{max(far):.4f}",
        f"**`scan` against torch's all-gather of states** (target: 2 times as fast): "
        f"{min(faster):.1f} to {max(faster):.1f} times as fast",
        _auto_line("`auto` over the fastest of our algorithms", cells),
    ]


def small_goals(cells: Sequence[Record]) -> list[str]:
    return [_auto_line("Small states, `auto` over the fastest", cells)] if cells else []


def _auto_line(title: str, cells: Sequence[Record]) -> str:
    ratios = [summary.auto_over_best(cell) for cell in cells]
    fastest = [summary.fastest(cell) for cell in cells]
    names = ", ".join(f"{name} in {fastest.count(name)}" for name in dict.fromkeys(fastest))
    return f"**{title}**: {_range(ratios)}; the fastest was {names}"


def _range(ratios: Sequence[Any]) -> str:
    """Of the medians."""
    middles = [ratio.middle for ratio in ratios]
    return f"{min(middles):.3f} to {max(middles):.3f}"


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


def _own(cells: Sequence[Record]) -> str:
    found = []
    for cell in cells:
        rows = {row.name: row for row in summary.rows(cell)}
        own = [f"{1e3 * rows[n].busy:.1f}" for n in ALGORITHMS]
        found.append([summary.setting_of(cell).words, *own])
    return markdown(["", *ALGORITHMS], found)


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


# --- the hybrid stack ----------------------------------------------------------------------


def hybrid(run: Known) -> str:
    cells = run["cells"]
    stack = Stack(**cells[0]["stack"])
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
    return "\n\n".join([
        f"{_measured(run)} Three layers of gated delta rule and one of causal softmax attention in "
        f"the shapes of {stack.model}: attention {stack.heads} heads of {stack.width} and "
        f"{stack.kv_heads} of keys and values; states {stack.state_heads} of {stack.state_width} x "
        f"{stack.state_width}; {human(stack.tokens)} tokens per rank, zigzag, bf16. Linear layers "
        "pass their states by `auto`. *Compute* is a sleep as long as a device of one speed would "
        "take, for all layers: in *balanced* the attention's takes as long as burst's links are "
        "busy, in *compute* three times as long. *Exposed*: what the stack takes beyond its "
        "compute. Seconds: median [quartiles] of forward and backward; MiB: of attention, the "
        "rank that sends most.",
        markdown(heads, found),
    ])  # fmt: skip


def _measured(run: Known) -> str:
    loads = [x for cell in run["cells"] for x in cell["load"]]
    return (
        f"Measured by `{run['command']}` on {run['machine']}, load {min(loads):.0f} to "
        f"{max(loads):.0f}."
    )

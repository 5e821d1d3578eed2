"""Tables of the records. This module runs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from benchmarks.cluster.mail import LINKS
from benchmarks.cluster.record import MIB, Record
from benchmarks.cluster.table import extra_bytes, totals
from benchmarks.report import Ratio, markdown

from .settings import ALGORITHMS, ALL_TO_ALL, CONVOLUTION, GATHER, Setting

COLUMNS = (ALL_TO_ALL, GATHER, *ALGORITHMS)


def cluster(records: Sequence[Record]) -> str:
    """Return states on the emulated cluster: seconds, bytes and the choice of `auto`."""
    over = [auto_over_best(record).middle for record in records]
    chosen = [
        f"- {setting_of(r).words}: "
        + ", ".join(f"{x['name']}: {x['says']}" for x in r["rivals"] if x["name"] in ALGORITHMS[2:])
        for r in records
    ]
    return "\n\n".join([
        f"`auto` over the fastest of our algorithms: {min(over):.3f} to {max(over):.3f}.",
        "Seconds of forward and backward, medians; ratios are of runs of the same round: median "
        "(smallest to largest).",
        _times(records),
        "MiB that a rank sends on average in both passes, within its node + between nodes.",
        _bytes(records), "What runs, and what `auto` takes at the rates measured:",
        "\n".join(chosen),
    ])  # fmt: skip


def setting_of(record: Record) -> Setting:
    return Setting(**record["setting"])


def ratio(times: dict[str, list[float]], above: str, below: str) -> Ratio | None:
    """Return ratios of runs in the same rounds; None if one of them did not run."""
    if above not in times or below not in times:
        return None
    return Ratio.of(times[above], times[below])


def auto_over_best(record: Record) -> Ratio:
    """Return the time of "auto" relative to the fastest of our algorithms, round by round."""
    times = totals(record)
    fixed = [name for name in ALGORITHMS if name != "auto" and name in times]
    return Ratio.of(times["auto"], times[min(fixed, key=lambda name: median(times[name]))])


def _times(records: Sequence[Record]) -> str:
    lines = []
    for record in records:
        times, setting = totals(record), setting_of(record)
        lines.append([
            f"{setting.form}, {setting.layout}", f"{setting.heads} of {setting.width}",
            *(f"{median(times[n]):.3f}" if n in times else "-" for n in (*COLUMNS, CONVOLUTION)),
            str(ratio(times, "auto", ALL_TO_ALL) or "-"), str(ratio(times, GATHER, "scan") or "-"),
        ])  # fmt: skip
    heads = ["", "heads", "all-to-all", "torch gather", *ALGORITHMS, "convolution",
             "auto / all-to-all", "gather / scan"]  # fmt: skip
    return markdown(heads, lines)


def _bytes(records: Sequence[Record]) -> str:
    lines = []
    for record in records:
        sent = {rival["name"]: rival["bytes"] for rival in record["rivals"]}
        size = record["grid"][0] * record["grid"][1]
        mean = {
            name: " + ".join(f"{rival_bytes[link]['formula'] / size / MIB:.2f}" for link in LINKS)
            for name, rival_bytes in sent.items()
        }
        extra = max(max(extra_bytes(sent[n]).values(), default=0) for n in COLUMNS[:4] if n in sent)
        lines.append([setting_of(record).words, *(mean.get(n, "-") for n in COLUMNS),
                      f"{extra:.1f} %"])  # fmt: skip
    return markdown(["", "all-to-all", "torch gather", *ALGORITHMS, "headers, at most"], lines)

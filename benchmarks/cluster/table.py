"""From records to what is read: medians with quartiles, the limit, and the table as Markdown.

The limit of a pass is max(compute, intra bytes / rate, inter bytes / rate) of the busiest rank,
with the rates that a plain transfer reached in the same run; that of a call is the sum of both
passes. Nothing here runs anything.
"""

from __future__ import annotations

from statistics import median, quantiles
from typing import Any, NamedTuple

PASSES = ("forward", "backward")
Record = dict[str, Any]


class Row(NamedTuple):
    """One rival in one cell; times in seconds."""

    name: str
    low: float
    middle: float
    high: float
    forward: float
    backward: float
    limit: float
    over_limit: float
    sent: dict[str, float]  # link class -> kernel bytes over the formula's, less one
    against: float  # median over repeats of this time over that of the best burst
    fixed: float  # the same, over that of the best rival that is not "auto"
    forecast: float | None


def rows(record: Record) -> list[Row]:
    """The rivals of one cell, in the order they ran."""
    totals = {r["name"]: [sum(run.values()) for run in r["seconds"]] for r in record["rivals"]}
    best = min(
        (name for name in totals if name.startswith(("burst", "double_ring, overlapped"))),
        key=lambda name: median(totals[name]),
        default=next(iter(totals)),
    )
    given = {name: times for name, times in totals.items() if not name.startswith("auto")}
    fixed = min(given or totals, key=lambda name: median(totals[name]))
    found = []
    for rival in record["rivals"]:
        times = totals[rival["name"]]
        low, middle, high = (
            quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
        )
        bound = limit(record, rival)
        found.append(
            Row(
                rival["name"], low, middle, high,
                *(median(run[name] for run in rival["seconds"]) for name in PASSES),
                bound, middle / bound,
                _extra(rival["bytes"]),
                *(
                    median(a / b for a, b in zip(times, totals[name], strict=True))
                    for name in (best, fixed)
                ),
                rival.get("forecast"),
            )
        )  # fmt: skip
    return found


def _extra(sent: Record) -> dict[str, float]:
    return {k: b["kernel"] / b["formula"] - 1 for k, b in sent.items() if b["formula"]}


def limit(record: Record, rival: Record) -> float:
    """Seconds below which no schedule of these bytes and FLOPs can come."""
    rates = {link: median(values) for link, values in record["plain"].items() if values}
    speed = record["speed"]
    total = 0.0
    for name in PASSES:
        bounds = [8 * n / rates[link] for link, n in rival["busiest"][name].items() if n]
        if speed:
            bounds.append(rival["flops"][name] / speed)
        total += max(bounds, default=0.0)
    return total


def headline(record: Record) -> str:
    """What a cell is, in one line."""
    cell = record["cell"]
    speed = record["speed"]
    compute = {None: "real compute"}.get(speed, "compute takes no time (emulated)")
    if speed:
        compute = f"emulated compute at {speed / 1e9:.1f} GFLOP/s per rank"
    plain = ", ".join(
        f"{link} {median(values) / 1e6:.0f}" for link, values in record["plain"].items() if values
    )
    return (
        f"{cell['nodes']} nodes x {cell['per_node']} ranks, {cell['heads']}, "
        f"{cell['rates']} bit/s (inter/intra), {cell['regime']}: {compute}; "
        f"{cell['tokens']} tokens per rank; a plain transfer reached {plain} Mbit/s"
    )


def markdown(record: Record) -> str:
    lines = [
        f"**{headline(record)}**",
        "",
        "| | seconds: median (quartiles) | forward + backward | limit | over the limit | "
        "over the best burst | over the best fixed | forecast | kernel bytes over formula |",
        "|-|-|-|-|-|-|-|-|-|",
    ]
    for row in rows(record):
        bytes_ = ", ".join(f"{link} {extra:+.1%}" for link, extra in row.sent.items())
        no_limit = record["speed"] is None
        lines.append(
            f"| {row.name} | {row.middle:.3f} ({row.low:.3f} to {row.high:.3f}) | "
            f"{row.forward:.3f} + {row.backward:.3f} | {row.limit:.3f}{' (links)' * no_limit} | "
            f"{row.over_limit:.2f} | {row.against:.2f} | {row.fixed:.2f} | "
            f"{'' if row.forecast is None else f'{row.forecast:.3f}'} | {bytes_} |"
        )
    lines += [
        f"\n{rival['name']}: {rival['chosen']}" for rival in record["rivals"] if rival.get("chosen")
    ]
    lines += [f"\n{text}" for text in record["left out"]]
    return "\n".join(lines) + "\n"

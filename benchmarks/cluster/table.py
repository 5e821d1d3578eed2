"""From records to what is read: medians with quartiles, the limit, and the table as Markdown.

The limit of a pass is max(compute, intra bytes / rate, inter bytes / rate) of the busiest rank,
with the highest rates that anything reached in the same run, a plain transfer or a rival; that of a
call is the sum of both passes. Nothing here runs anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles
from typing import Any, NamedTuple

PASSES = ("forward", "backward")
OURS = ("burst", "double_ring, overlapped", "auto")  # double_ring, overlapped is burst, side kv
Record = dict[str, Any]


class Ratio(NamedTuple):
    """Of two rivals, repeat by repeat: the middle, the smallest and the largest."""

    middle: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.middle:.2f} ({self.least:.2f} to {self.most:.2f})"


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
    against: Ratio  # of this time over that of the best burst
    fixed: Ratio  # of this time over that of the best rival that is not "auto"
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
                _ratio(times, totals[best]),
                _ratio(times, totals[fixed]),
                rival.get("forecast"),
            )
        )  # fmt: skip
    return found


def _ratio(mine: list[float], other: list[float]) -> Ratio:
    each = [a / b for a, b in zip(mine, other, strict=True)]
    return Ratio(median(each), min(each), max(each))


def _extra(sent: Record) -> dict[str, float]:
    return {k: b["kernel"] / b["formula"] - 1 for k, b in sent.items() if b["formula"]}


def limit(record: Record, rival: Record) -> float:
    """Seconds below which no schedule of these bytes and FLOPs can come."""
    rates = reached(record)
    speed = record["speed"]
    total = 0.0
    for name in PASSES:
        bounds = [8 * n / rates[link] for link, n in rival["busiest"][name].items() if n]
        if speed:
            bounds.append(rival["flops"][name] / speed)
        total += max(bounds, default=0.0)
    return total


def reached(record: Record) -> dict[str, float]:
    """Payload bits per second of each link class: the middle of the plain transfers, or what the
    busiest rank of a rival sustained through a whole pass, where that is more."""
    rates = {link: median(values) for link, values in record["plain"].items() if values}
    for rival in record["rivals"]:
        for name in PASSES:
            seconds = median(run[name] for run in rival["seconds"])
            for link, sent in rival["busiest"][name].items():
                if sent:
                    rates[link] = max(rates[link], 8 * sent / seconds)
    return rates


def headline(record: Record) -> str:
    """What a cell is, in one line."""
    cell = record["cell"]
    speed = record["speed"]
    compute = {None: "real compute"}.get(speed, "compute takes no time (emulated)")
    if speed:
        compute = f"emulated compute at {speed / 1e9:.1f} GFLOP/s per rank"
    most = ", ".join(f"{link} {rate / 1e6:.0f}" for link, rate in reached(record).items())
    return (
        f"{cell['nodes']} nodes x {cell['per_node']} ranks, {cell['heads']}, "
        f"{cell['rates']} bit/s (inter/intra), {cell['regime']}: {compute}; "
        f"{cell['tokens']} tokens per rank; the links reached {most} Mbit/s"
    )


def summary(records: Sequence[Record]) -> str:
    """What the tables say of the two goals that every cell has, counted; cells that miss are named.

    `auto` over the best of the others, and where compute is emulated and takes time, the fastest of
    burst and `auto` over its own limit.
    """
    autos, limits = [], []  # (cell, value): a cell may have been measured twice
    for record in records:
        found = {row.name: row for row in rows(record)}
        if "auto" in found:
            autos.append((short(record), found["auto"].fixed.middle))
        if record["speed"]:
            mine = [row for name, row in found.items() if name.startswith(OURS)]
            fastest = min(mine, key=lambda row: row.middle)
            limits.append((short(record), fastest.over_limit))
    return "\n".join(
        f"- **{what}**: {_counted(values, goal)}"
        for what, values, goal in (
            ("`auto` over the best of the others", autos, 1.05),
            ("The fastest of burst and `auto` over its limit, with compute", limits, 1.10),
        )
        if values
    )


def _counted(values: list[tuple[str, float]], goal: float) -> str:
    worst = sorted(values, key=lambda item: -item[1])
    missed = [f"; {value:.2f} in {name}" for name, value in worst if value > goal]
    return (
        f"{worst[-1][1]:.2f} to {worst[0][1]:.2f}, within {goal:.2f} in "
        f"{len(values) - len(missed)} of {len(values)} cells" + "".join(missed)
    )


def short(record: Record) -> str:
    cell = record["cell"]
    regime = {"communication": "no compute"}.get(cell["regime"], cell["regime"])
    size = f"{cell['nodes']} x {cell['per_node']} {cell['rates']} {cell['heads']}"
    return f"{size} {regime}, {cell['tokens']} tokens"


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
            f"{row.over_limit:.2f} | {row.against} | {row.fixed} | "
            f"{'' if row.forecast is None else f'{row.forecast:.3f}'} | {bytes_} |"
        )
    lines += [
        f"\n{rival['name']}: {rival['chosen']}" for rival in record["rivals"] if rival.get("chosen")
    ]
    lines += [f"\n{text}" for text in record["left out"]]
    return "\n".join(lines) + "\n"

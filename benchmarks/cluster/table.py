"""From the records of a run to what is read: medians with quartiles, the limit.

The limit of a pass is max(compute, intra bytes / rate, inter bytes / rate) of the busiest rank,
with the highest rates that anything reached in the same cell, a plain transfer or a rival; that of
a call is the sum of both passes. Nothing here runs anything.
"""

from __future__ import annotations

from statistics import median, quantiles
from typing import Any, NamedTuple

from .cells import Cell
from .network import Rates
from .results import Kept, Setting

PASSES = ("forward", "backward")
Record = dict[str, Any]


class Ratio(NamedTuple):
    """Of the times of two rivals, repeat by repeat: the median, the smallest and the largest."""

    middle: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.middle:.2f} ({self.least:.2f} to {self.most:.2f})"


class Row(NamedTuple):
    """One rival in one cell; times in seconds."""

    name: str
    low: float  # lower quartile
    middle: float
    high: float  # upper quartile
    forward: float
    backward: float
    limit: float
    over_limit: float
    against: Ratio  # this time over that of the fastest burst
    fixed: Ratio  # this time over that of the fastest rival that is not "auto"
    predicted: float | None
    extra: dict[str, float]  # link class -> kernel bytes over the formula's, less one, in per cent


def setting(record: Record) -> Setting:
    """What is kept of one cell's record: seconds to milliseconds, ratios to hundredths."""
    speed, cell = record["speed"], record["cell"]
    kept = tuple(
        Kept(row.name, *(round(x, 3) for x in (row.middle, row.forward, row.backward)),
             *(round(x, 2) for x in (row.over_limit, row.fixed.middle)))
        for row in rows(record)
    )  # fmt: skip
    gflops = None if speed is None else round(speed / 1e9, 1)
    return Setting(Cell(**cell | {"rates": Rates.parse(cell["rates"])}), gflops, kept)


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
                _ratio(times, totals[best]),
                _ratio(times, totals[fixed]),
                rival.get("predicted"),
                extra_bytes(rival["bytes"]),
            )
        )  # fmt: skip
    return found


def _ratio(mine: list[float], other: list[float]) -> Ratio:
    each = [a / b for a, b in zip(mine, other, strict=True)]
    return Ratio(median(each), min(each), max(each))


def extra_bytes(sent: Record) -> dict[str, float]:
    return {k: 100 * (b["kernel"] / b["formula"] - 1) for k, b in sent.items() if b["formula"]}


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
    """Payload bits per second of each link class: the median of the plain transfers, or what the
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
    cell, speed = record["cell"], record["speed"]
    if speed is None:
        compute = "real compute"
    elif speed:
        compute = f"emulated compute at {speed / 1e9:.1f} GFLOP/s per rank"
    else:
        compute = "compute takes no time (emulated)"
    most = ", ".join(f"{link} {rate / 1e6:.0f}" for link, rate in reached(record).items())
    return (
        f"{cell['nodes']} nodes x {cell['per_node']} ranks, {cell['heads']}, "
        f"{cell['rates']} bit/s (inter/intra), {cell['regime']}: {compute}; "
        f"{cell['tokens']} tokens per rank; the links reached {most} Mbit/s"
    )

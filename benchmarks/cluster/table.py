"""From the records of a run to what is read: medians with quartiles, the limit, Markdown tables.

The limit of a pass is max(compute, intra bytes / rate, inter bytes / rate) of the busiest rank,
with the highest rates that anything reached in the same cell, a plain transfer or a rival; that of
a call is the sum of both passes. Nothing here runs anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles
from typing import Any, NamedTuple

from .results import Measured, Ratio, Results, Row, Run

PASSES = ("forward", "backward")
OURS = ("burst", "double_ring, overlapped", "auto")  # double_ring, overlapped is burst, side kv
Record = dict[str, Any]


# --- records to rows -----------------------------------------------------------------------


def gathered(records: Record) -> Results:
    """What is kept of one run's records: its command, machine and cells."""
    run = Run(records["command"], records["machine"])
    return Results((run,), tuple(measured(record) for record in records["cells"]))


def measured(record: Record) -> Measured:
    """What is kept of one cell's record, rounded to what is printed."""
    speed = record["speed"]
    return Measured(
        cell=dict(record["cell"]),
        gflops=None if speed is None else round(speed / 1e9, 1),
        reached={link: round(rate / 1e6) for link, rate in reached(record).items()},
        rows=tuple(_rounded(row) for row in rows(record)),
        chosen={r["name"]: r["chosen"] for r in record["rivals"] if r.get("chosen")},
        left_out=tuple(record["left out"]),
    )


def _rounded(row: Row) -> Row:
    """Seconds to milliseconds, ratios to hundredths, per cent to tenths."""
    seconds = ("low", "middle", "high", "forward", "backward", "limit")
    return row._replace(
        **{name: round(getattr(row, name), 3) for name in seconds},
        over_limit=round(row.over_limit, 2),
        against=Ratio(*(round(x, 2) for x in row.against)),
        fixed=Ratio(*(round(x, 2) for x in row.fixed)),
        predicted=None if row.predicted is None else round(row.predicted, 3),
        extra={link: round(x, 1) for link, x in row.extra.items()},
    )


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
                _extra(rival["bytes"]),
            )
        )  # fmt: skip
    return found


def _ratio(mine: list[float], other: list[float]) -> Ratio:
    each = [a / b for a, b in zip(mine, other, strict=True)]
    return Ratio(median(each), min(each), max(each))


def _extra(sent: Record) -> dict[str, float]:
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


# --- rows to words -------------------------------------------------------------------------


def headline(found: Measured) -> str:
    """What a cell is, in one line."""
    cell = found.cell
    if found.gflops is None:
        compute = "real compute"
    elif found.emulated:
        compute = f"emulated compute at {found.gflops:.1f} GFLOP/s per rank"
    else:
        compute = "compute takes no time (emulated)"
    most = ", ".join(f"{link} {rate:.0f}" for link, rate in found.reached.items())
    return (
        f"{cell['nodes']} nodes x {cell['per_node']} ranks, {cell['heads']}, "
        f"{cell['rates']} bit/s (inter/intra), {cell['regime']}: {compute}; "
        f"{cell['tokens']} tokens per rank; the links reached {most} Mbit/s"
    )


def short(found: Measured) -> str:
    cell = found.cell
    regime = {"communication": "no compute"}.get(cell["regime"], cell["regime"])
    size = f"{cell['nodes']} x {cell['per_node']} {cell['rates']} {cell['heads']}"
    return f"{size} {regime}, {cell['tokens']} tokens"


class Goal(NamedTuple):
    """A ratio that every cell has, and how many cells stay within `most`."""

    what: str
    most: float
    values: tuple[tuple[str, float], ...]  # cell, ratio: a cell may have been measured twice

    @property
    def missed(self) -> list[tuple[str, float]]:
        return sorted((v for v in self.values if v[1] > self.most), key=lambda item: -item[1])

    def __str__(self) -> str:
        least, largest = (pick(value for _, value in self.values) for pick in (min, max))
        return (
            f"**{self.what}**: {least:.2f} to {largest:.2f}, within {self.most:.2f} in "
            f"{len(self.values) - len(self.missed)} of {len(self.values)} settings"
        )


def goals(cells: Sequence[Measured]) -> list[Goal]:
    """`auto` over the best of the others, and where compute is emulated and takes time, the fastest
    of burst and `auto` over its own limit."""
    autos, limits = [], []
    for found in cells:
        autos += [(short(found), row.fixed.middle) for row in found.rows if row.name == "auto"]
        best = fastest(found)
        if found.emulated and best is not None:
            limits.append((short(found), best.over_limit))
    both = (
        Goal("`auto` over the fastest of the other algorithms", 1.05, tuple(autos)),
        Goal("The fastest of burst and `auto` over its limit, with compute", 1.10, tuple(limits)),
    )
    return [goal for goal in both if goal.values]


def fastest(found: Measured) -> Row | None:
    """Of burst and `auto`; None if neither was run."""
    ours = [row for row in found.rows if row.name.startswith(OURS)]
    return min(ours, key=lambda row: row.middle, default=None)


def simulator(cells: Sequence[Measured]) -> str:
    """How often the simulator's prediction was near the median."""
    off = [
        abs(row.middle / row.predicted - 1)
        for found in cells
        for row in found.rows
        if row.predicted
    ]
    near, nearer = (sum(error <= most for error in off) for most in (0.10, 0.05))
    return (
        f"**The simulator behind `auto`**: {nearer} of {len(off)} medians are within 5 % of its "
        f"prediction, {near} within 10 %"
    )


def markdown(found: Measured) -> str:
    lines = [
        f"**{headline(found)}**",
        "",
        "| | seconds: median (quartiles) | forward + backward | limit | over the limit | "
        "over the best burst | over the best fixed | predicted | kernel bytes over formula |",
        "|-|-|-|-|-|-|-|-|-|",
    ]
    for row in found.rows:
        bytes_ = ", ".join(f"{link} {extra:+.1f}%" for link, extra in row.extra.items())
        only_links = " (links)" * (found.gflops is None)
        lines.append(
            f"| {row.name} | {row.middle:.3f} ({row.low:.3f} to {row.high:.3f}) | "
            f"{row.forward:.3f} + {row.backward:.3f} | {row.limit:.3f}{only_links} | "
            f"{row.over_limit:.2f} | {row.against} | {row.fixed} | "
            f"{'' if row.predicted is None else f'{row.predicted:.3f}'} | {bytes_} |"
        )
    lines += [f"\n{name}: {chosen}" for name, chosen in found.chosen.items()]
    lines += [f"\n{text}" for text in found.left_out]
    return "\n".join(lines) + "\n"

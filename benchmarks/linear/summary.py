"""What the records say: medians and ratios, run by run. Nothing here runs anything.

*Limit*: the busiest interface's bytes over the rate that plain transfers reached, both passes.
"""

from __future__ import annotations

from statistics import median
from typing import Any, NamedTuple

from benchmarks.cluster.mail import LINKS, PASSES

from .settings import ALGORITHMS, ALL_TO_ALL, GATHER, Setting

Record = dict[str, Any]
MIB = 1 << 20


class Ratio(NamedTuple):
    """Of the times of two rivals, round by round: median, smallest, largest."""

    middle: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.middle:.3f} ({self.least:.3f} to {self.most:.3f})"


class Row(NamedTuple):
    """One rival in one setting; seconds, forward and backward in `total`. ratios: to the rivals."""

    name: str
    says: str
    total: tuple[float, ...]
    forward: float
    backward: float
    limit: float
    to_all: Ratio | None
    to_gather: Ratio | None
    bytes: dict[str, float]  # link class -> MiB that a rank sends on average
    extra: dict[str, float]  # link class -> kernel's bytes over the formula's, per cent more
    error: float
    busy: float  # seconds of a rank's own thread


def setting_of(record: Record) -> Setting:
    return Setting(**record["setting"])


def rows(record: Record) -> list[Row]:
    """The rivals of a setting, in the order they ran."""
    times = {r["name"]: totals(r) for r in record["rivals"]}
    size = record["grid"][0] * record["grid"][1]
    found = []
    for r in record["rivals"]:
        sent = r["bytes"]
        found.append(
            Row(
                r["name"], r["says"], times[r["name"]],
                *(median(run[p] for run in r["seconds"]) for p in PASSES),
                limit(record, r), ratio(times, r["name"], ALL_TO_ALL),
                ratio(times, r["name"], GATHER),
                {link: sent[link]["formula"] / size / MIB for link in LINKS},
                {link: 100 * (n["kernel"] / n["formula"] - 1) for link, n in sent.items()
                 if n["formula"]},
                r["error"], r["busy"],
            )
        )  # fmt: skip
    return found


def totals(rival: Record) -> tuple[float, ...]:
    """Seconds of forward and backward of every run."""
    return tuple(sum(run[p] for p in PASSES) for run in rival["seconds"])


def ratio(times: dict[str, tuple[float, ...]], above: str, below: str) -> Ratio | None:
    """Of what took place in the same round; None where one of them did not run."""
    if above not in times or below not in times:
        return None
    each = [a / b for a, b in zip(times[above], times[below], strict=True)]
    return Ratio(median(each), min(each), max(each))


def limit(record: Record, rival: Record) -> float:
    """Seconds below which these bytes cannot cross the busiest interface."""
    reached = {link: median(values) for link, values in record["plain"].items()}
    return sum(
        max(8 * n / reached[link] for link, n in rival["busiest"][p].items()) for p in PASSES
    )


def fastest(record: Record) -> str:
    """Of our algorithms but "auto", by the median."""
    times = {r["name"]: median(totals(r)) for r in record["rivals"]}
    fixed = [name for name in ALGORITHMS if name != "auto" and name in times]
    return min(fixed, key=times.__getitem__)


def auto_over_best(record: Record) -> Ratio:
    """The time of "auto" over that of the fastest of our algorithms, round by round."""
    times = {r["name"]: totals(r) for r in record["rivals"]}
    found = ratio(times, "auto", fastest(record))
    assert found is not None
    return found

"""Tables from the records of runs: times, ratios run by run, limits, bytes.

The limit of a pass is max(compute, intra bytes / rate, inter bytes / rate) of the busiest rank and
interface, with the highest rates that a plain transfer or a rival reached in the same cell. The
limit of a call is the sum of both passes. *Gain* is the time of a base / time of the rival, run by
run; *permitted* is the limit of the base / limit of the rival. This module runs nothing.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from statistics import median
from typing import Any, NamedTuple

from benchmarks.report import Ratio, markdown, quartiles

from .mail import LINKS, PASSES
from .record import MIB, Record
from .suites import Targets


class Row(NamedTuple):
    """One rival in one cell; times in seconds.

    Attributes:
        gain: Time of the base / time of the rival.
        between, within: MiB that a rank sends in both passes, mean and busiest.
        least: Mean between nodes if every row crossed once to each node that needs it.
        extra: Bytes by the kernel / bytes by the formula, minus one, in percent.
        imbalance: FLOPs of the busiest rank / mean over ranks.
    """

    name: str
    low: float  # lower quartile
    middle: float
    high: float  # upper quartile
    forward: float
    backward: float
    limit: float
    gain: Ratio
    permitted: float
    between: tuple[float, float]
    within: tuple[float, float]
    least: float
    extra: dict[str, float]
    predicted: float | None
    imbalance: float | None

    @property
    def over_limit(self) -> float:
        """Return time over limit, infinite if nothing is sent or computed."""
        return self.middle / self.limit if self.limit else math.inf


def rows(record: Record, base: str) -> list[Row]:
    """Return the rivals of one cell, in the order of their runs, compared with `base`."""
    times = totals(record)
    limits = {r["name"]: limit(record, r) for r in record["rivals"]}
    size = record["cell"]["nodes"] * record["cell"]["per_node"]
    return [
        Row(
            name, *quartiles(times[name]),
            *(median(run[p] for run in rival["seconds"]) for p in PASSES),
            limits[name], Ratio.of(times[base], times[name]),
            limits[base] / limits[name] if limits[name] else math.inf,
            *(_sent(rival, link) for link in reversed(LINKS)),
            rival["least"] / size / MIB, extra_bytes(rival["bytes"]),
            rival.get("predicted"), rival["imbalance"],
        )
        for rival in record["rivals"]
        for name in (rival["name"],)
    ]  # fmt: skip


def totals(record: Record) -> dict[str, list[float]]:
    """Map each rival to the seconds of both passes of every run."""
    return {r["name"]: [sum(run.values()) for run in r["seconds"]] for r in record["rivals"]}


def fastest(record: Record, names: Iterable[str] = ()) -> str:
    """Return the fastest of the named rivals by the median.

    If none of them ran, return the fastest that is not "auto"; "" if all were refused.
    """
    times = {name: median(seconds) for name, seconds in totals(record).items()}
    candidates = [name for name in names if name in times]
    return min(
        candidates or [name for name in times if not name.startswith("auto")] or times,
        key=times.__getitem__,
        default="",
    )


def _sent(rival: Record, link: str) -> tuple[float, float]:
    """Return MiB of both passes that a rank sends over a link class: mean, and busiest."""
    mean, busiest = (sum(rival[x][p][link] for p in PASSES) / MIB for x in ("mean", "sender"))
    return mean, busiest


def extra_bytes(sent: Record) -> dict[str, float]:
    return {k: 100 * (b["kernel"] / b["formula"] - 1) for k, b in sent.items() if b["formula"]}


def limit(record: Record, rival: Record) -> float:
    """Return the minimum seconds for the rival's bytes and FLOPs."""
    rates, speed, total = reached(record), record["speed"], 0.0
    for p in PASSES:
        bounds = [8 * n / rates[link] for link, n in rival["busiest"][p].items() if n]
        if speed:
            bounds.append(rival["flops"][p] / speed)
        total += max(bounds, default=0.0)
    return total


def reached(record: Record) -> dict[str, float]:
    """Return payload bits per second of each link class.

    It is the median of the plain transfers, or the rate that the busiest interface of a rival
    sustained through a whole pass, if that is higher.
    """
    rates = {link: median(values) for link, values in record["plain"].items() if values}
    for rival in record["rivals"]:
        for p in PASSES:
            seconds = median(run[p] for run in rival["seconds"])
            for link, sent in rival["busiest"][p].items():
                if sent:
                    rates[link] = max(rates[link], 8 * sent / seconds)
    return rates


# --- as words ------------------------------------------------------------------------------


def headline(record: Record) -> str:
    """Return the title of a cell."""
    cell = record["cell"]
    wiring = "" if cell["wiring"] == "nic" else f", links per pair of ranks ({cell['wiring']})"
    width = "" if cell["width"] == 64 else f" of width {cell['width']}"
    wire = "" if cell["wire"] == cell["dtype"] else f", {cell['wire']} on the wire"
    wire = ("" if cell["dtype"] == "fp32" else f", {cell['dtype']}") + wire
    return (
        f"{cell['nodes']} x {cell['per_node']}, {cell['mask']}, {cell['tokens']} tokens per rank, "
        f"{cell['heads']}{width}, {cell['rates']}{wiring}{wire}, {cell['regime']}"
    )


def shown(record: Record, base: str) -> str:
    """Return the table and the notes of one cell."""
    speed = record["speed"]
    compute = "real compute"
    if speed is not None:
        compute = f"compute at {speed / 1e9:.1f} GFLOP/s" if speed else "compute takes no time"
    rates = ", ".join(f"{link} {rate / 1e6:.0f}" for link, rate in reached(record).items())
    cells = [
        [
            row.name, f"{row.middle:.3f} [{row.low:.3f}, {row.high:.3f}]",
            f"{row.forward:.3f} + {row.backward:.3f}", f"{row.over_limit:.2f}", str(row.gain),
            f"{row.permitted:.2f}", "-" if row.predicted is None else f"{row.predicted:.3f}",
            "{:.2f} ({:.2f}), least {:.2f}".format(*row.between, row.least),
            "{:.2f} ({:.2f})".format(*row.within),
            " ".join(f"{link} {extra:+.1f}%" for link, extra in row.extra.items()) or "-",
            "-" if row.imbalance is None else f"{row.imbalance:.3f}",
        ]
        for row in rows(record, base)
    ]  # fmt: skip
    heads = ["", "seconds", "forward + backward", "over the limit", f"gain over {base}",
             "permitted", "predicted", "MiB between nodes (most)", "within (most)", "headers",
             "imbalance"]  # fmt: skip
    blank = [""] * (len(heads) - 2)
    cells += [
        [refusal["name"], f"refused: {refusal['reason']}", *blank] for refusal in refused(record)
    ]
    chosen = [f"{r['name']}: {r['says']}" for r in record["rivals"] if r["says"]]
    title = f"{headline(record)}: {compute}; links reached {rates} Mbit/s; load {record['load']}"
    return "\n".join([f"**{title}**", "", markdown(heads, cells), *record["left out"], *chosen])


def refused(record: Record) -> list[Record]:
    """Return name, reason and `wrong` of each rival without times; none in older records."""
    return record.get("refused", [])


def refusals(records: Sequence[Record]) -> str:
    """Return a line per refused rival and cell; "" if every rival ran."""
    return "\n".join(
        f"refused: {refusal['name']}, {headline(record)}: {refusal['reason']}"
        for record in records
        for refusal in refused(record)
    )


def summary(records: Sequence[Record], base: Sequence[str]) -> str:
    """Return a table with a row per setting and a column per rival.

    If a rival ran with several numbers of head chunks, the fastest counts. Batches that differ only
    in the seed are one row of medians.
    """
    ran = [record for record in records if record["rivals"]]
    entries = [(_setting(r), first, rows(r, first)) for r in ran for first in [fastest(r, base)]]
    bases = {family(first) for _, first, _ in entries}
    ways = dict.fromkeys(family(row.name) for *_, entry_rows in entries for row in entry_rows)
    ways = [way for way in ways if bases != {way}]
    lines = []
    for setting, group in groupby(sorted(entries, key=lambda x: x[0]), key=lambda x: x[0]):
        batch = list(group)
        over = median(
            row.over_limit for _, first, all_ in batch for row in all_ if row.name == first
        )
        count = f", {len(batch)} batches" if len(batch) > 1 else ""
        columns = [_column([(first, all_) for _, first, all_ in batch], way) for way in ways]
        lines.append([f"{setting}{count}", f"{batch[0][1]} ({over:.2f})", *columns])
    return markdown(["setting", "base (over the limit)", *ways], lines)


def beside(records: Sequence[Record], ours: str, base: Sequence[str], targets: Targets) -> str:
    """Return a table of `ours` over each other rival and over its limit, with targets and settings.

    Ratios compare consecutive runs: median, smallest and largest. Ratios to the limit compare
    batches. The base of a batch is the fastest of `base`. Batches that refused `ours` are omitted.
    """
    ran = [record for record in records if ours in totals(record)]
    rivals = dict.fromkeys(r["name"] for x in ran for r in x["rivals"] if r["name"] != ours)
    lines = []
    for setting, group in groupby(sorted(ran, key=_setting), key=_setting):
        batch = list(group)
        first = batch[0]["cell"]
        kind = (first["mask"].removeprefix("documents ").partition(" ")[0], first["regime"])
        goals = [f"; target {goal:.2f}" for goal in targets.get(kind, ())] or ["", ""]
        bases = [fastest(record, base) for record in batch]
        over = [row.over_limit for record, first_rival in zip(batch, bases, strict=True)
                for row in rows(record, first_rival) if row.name == ours]  # fmt: skip
        choice_counts = Counter(r["says"].partition(" (")[0] for x in batch for r in x["rivals"]
                                if r["name"] == ours)  # fmt: skip
        lines.append([
            f"{setting}, {len(batch)} {'batch' if len(batch) == 1 else 'batches'}",
            f"{_over(batch, ours, bases)}{goals[0]}",
            f"{Ratio(median(over), min(over), max(over))}{goals[1]}",
            *(_over(batch, ours, [name] * len(batch)) for name in rivals),
            "; ".join(f"{words} ({n})" for words, n in choice_counts.most_common()),
        ])  # fmt: skip
    heads = ["setting", "over the fastest of the base", "over the limit",
             *(f"over {name}" for name in rivals), "taken (batches)"]  # fmt: skip
    return markdown(heads, lines)


def _over(batch: Sequence[Record], ours: str, rivals: Sequence[str]) -> str:
    """Return the time of ours over another rival in each batch, run by run; "" if none ran."""
    our_seconds, rival_seconds = [], []
    for record, rival in zip(batch, rivals, strict=True):
        times = totals(record)
        if rival in times:
            our_seconds += times[ours]
            rival_seconds += times[rival]
    return str(Ratio.of(our_seconds, rival_seconds)) if rival_seconds else ""


def _setting(record: Record) -> str:
    """Return the setting without the seed, and then without what the suite leaves open."""
    setting, seed, regime = headline(record).partition(" seed ")
    return f"{setting}, {regime.rpartition(', ')[2]}" if seed else setting


def family(name: str) -> str:
    """Return a rival's name without its number of head chunks."""
    return re.sub(r", \d+ head chunks", "", name)


def _column(batch: Sequence[tuple[str, Sequence[Row]]], way: str) -> str:
    """Return "2.00 (1.50 to 2.50), permitted 2.20, over the limit 1.10" of the fastest variant."""
    fast: list[Any] = [
        min(variants, key=lambda row: row.middle)
        for first, rows_of_batch in batch
        if family(first) != way
        and (variants := [row for row in rows_of_batch if family(row.name) == way])
    ]
    if not fast:
        return ""
    gains = [row.gain.middle for row in fast]
    gain = fast[0].gain if len(fast) == 1 else Ratio(median(gains), min(gains), max(gains))
    permitted, over = (median(getattr(r, x) for r in fast) for x in ("permitted", "over_limit"))
    chunks = fast[0].name.removeprefix(way)
    return f"{gain}, permitted {permitted:.2f}, over the limit {over:.2f}{chunks}"

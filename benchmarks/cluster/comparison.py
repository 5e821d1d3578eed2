"""What a comparison says: times as ratios to the base of its suite, run by run, beside what the
bytes permit; as data, as JSON and as Markdown. Nothing here runs anything.

*Permitted*: the base's limit over the rival's, that is what the busiest link would gain if both ran
at full speed. *Over the limit*: the time over max(compute, links). A link is busy with the bytes
that the busiest interface of its class sends or receives, at the highest rate that a plain transfer
or any rival reached in the setting.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from . import table
from .mail import LINKS, PASSES
from .record import Record
from .suites import SUITES
from .table import Ratio

MIB = 1 << 20


class Entry(NamedTuple):
    """One rival in one setting. seconds: of every run; ratio: the base's time over its own, run by
    run; between, within: MiB that a rank sends, mean and busiest; least: the mean between nodes if
    every row crossed once to each node that wants it; messages: average KiB by link; extra: kernel
    bytes over the formula's in per cent; imbalance: visible pairs of the busiest rank over their
    mean."""

    name: str
    seconds: tuple[float, ...]
    forward: float
    backward: float
    limit: float
    over_limit: float
    ratio: Ratio
    permitted: float
    between: tuple[float, float]
    within: tuple[float, float]
    least: float
    messages: dict[str, float]
    extra: dict[str, float]
    predicted: float | None = None
    imbalance: float | None = None


class Compared(NamedTuple):
    """All rivals in one setting. load: of the machine while it was measured."""

    suite: str
    cell: dict[str, Any]
    base: str
    reached: dict[str, float]
    entries: tuple[Entry, ...]
    left_out: tuple[str, ...]
    run: int = 0
    load: float = 0.0


class Run(NamedTuple):
    """One call of the command: its arguments, the machine and the date."""

    command: str
    machine: str


class Comparisons(NamedTuple):
    runs: tuple[Run, ...]
    cells: tuple[Compared, ...]


EMPTY = Comparisons((), ())


def compared(suite: str, record: Record, base: tuple[str, ...]) -> Compared:
    """What is kept of the record of a setting, rounded; its base is the fastest of those named."""
    totals = {r["name"]: [sum(run.values()) for run in r["seconds"]] for r in record["rivals"]}
    known = [name for name in base if name in totals] or list(totals)
    first = min(known, key=lambda name: median(totals[name]))
    limits = {r["name"]: table.limit(record, r) for r in record["rivals"]}
    entries = []
    for rival in record["rivals"]:
        name, times = rival["name"], totals[rival["name"]]
        pairs = zip(totals[first], times, strict=True)
        ratios = sorted(a / b for a, b in pairs)
        limit = limits[name]
        entries.append(
            Entry(
                name,
                tuple(round(t, 3) for t in times),
                *(round(median(run[p] for run in rival["seconds"]), 3) for p in PASSES),
                round(limit, 3),
                round(median(times) / limit, 2),
                Ratio(*(round(x, 2) for x in (median(ratios), ratios[0], ratios[-1]))),
                round(limits[first] / limit, 2),
                *(_sent(rival, link) for link in reversed(LINKS)),
                round(sum(rival["least"].values()) / _size(record) / MIB, 3),
                {link: _message(rival, link) for link in LINKS if _messages(rival, link)},
                {link: round(x, 1) for link, x in table.extra_bytes(rival["bytes"]).items()},
                rival["predicted"] and round(rival["predicted"], 3),
                round(rival["imbalance"], 3) if "imbalance" in rival else None,
            )
        )
    reached = {link: round(rate / 1e6) for link, rate in table.reached(record).items()}
    cell, left_out = dict(record["cell"]), tuple(record["left out"])
    return Compared(suite, cell, first, reached, tuple(entries), left_out)


def _size(record: Record) -> int:
    return record["cell"]["nodes"] * record["cell"]["per_node"]


def _sent(rival: Record, link: str) -> tuple[float, float]:
    """MiB of both passes that a rank sends over a link class: mean, and the busiest of each."""
    both = (sum(rival[which][p][link] for p in PASSES) / MIB for which in ("mean", "sender"))
    return tuple(round(x, 3) for x in both)  # pyright: ignore[reportReturnType]


def _messages(rival: Record, link: str) -> int:
    return sum(rival["messages"][p][link] for p in PASSES)


def _message(rival: Record, link: str) -> float:
    return round(rival["bytes"][link]["formula"] / _messages(rival, link) / 1024, 1)


# --- as JSON -------------------------------------------------------------------------------


def load(path: Path) -> Comparisons:
    data = json.loads(path.read_text())
    cells = (
        Compared(**cell | {"entries": tuple(map(_entry, cell["entries"])),
                           "left_out": tuple(cell["left_out"])})
        for cell in data["cells"]
    )  # fmt: skip
    return Comparisons(tuple(Run(**run) for run in data["runs"]), tuple(cells))


def _entry(row: dict[str, Any]) -> Entry:
    lists = {name: tuple(row[name]) for name in ("seconds", "between", "within")}
    return Entry(**row | lists | {"ratio": Ratio(*row["ratio"])})


def save(found: Comparisons, path: Path) -> None:
    """One line per run, per head of a setting and per rival."""
    cells = []
    for cell in found.cells:
        head = {name: value for name, value in cell._asdict().items() if name != "entries"}
        rows = ",\n".join(json.dumps(entry._asdict()) for entry in cell.entries)
        cells.append(f'{json.dumps(head)[:-1]}, "entries": [\n{rows}\n]}}')
    runs = ",\n".join(json.dumps(run._asdict()) for run in found.runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('{"runs": [\n' + runs + '\n],\n"cells": [\n' + ",\n".join(cells) + "\n]}\n")


# --- as words ------------------------------------------------------------------------------


def lines(found: Compared) -> str:
    """A setting in plain text, while it runs."""
    rows = [f"{headline(found)}; load {found.load}"]
    for e in found.entries:
        rows.append(
            f"  {e.name:24} {median(e.seconds):7.3f} s ({e.forward:.3f} + {e.backward:.3f}), "
            f"gain {e.ratio}, permitted {e.permitted:.2f}, over limit {e.over_limit:.2f}, between "
            f"{e.between[0]:.2f} mean {e.between[1]:.2f} most {e.least:.2f} least MiB, messages "
            f"{e.messages} KiB, extra {e.extra} %, predicted {e.predicted}, "
            f"imbalance {e.imbalance}"
        )
    return "\n".join([*rows, *(f"  {text}" for text in found.left_out)])


def headline(found: Compared) -> str:
    cell = found.cell
    wiring = "" if cell["wiring"] == "nic" else f", links per pair of ranks ({cell['wiring']})"
    width = "" if cell.get("width", 64) == 64 else f" of width {cell['width']}"
    wire = "" if cell["wire"] == "fp32" else f", {cell['wire']} on the wire"
    return (
        f"{cell['nodes']} x {cell['per_node']}, {cell['mask']}, {cell['tokens']} tokens per rank, "
        f"{cell['heads']}{width}, {cell['rates']}{wiring}{wire}, {cell['regime']}"
    )


def summary(found: Comparisons) -> str:
    """A table per suite: a row is a setting; batches of packed documents that differ by their seed
    alone are one row, whose numbers are medians over the batches."""
    parts = []
    for name, suite in SUITES.items():
        if cells := [cell for cell in found.cells if cell.suite == name]:
            parts += [f"{suite.what} ({name})", _summary(cells)]
    return "\n\n".join(parts)


def group(cell: Compared) -> str:
    """The setting; of documents what the suite leaves open, without their seed."""
    where, seed, rest = headline(cell).partition(" seed ")
    return f"{where}, {rest.rpartition(', ')[2]}" if seed else where


def summarized(cells: Sequence[Compared], rival: str) -> dict[str, tuple[float, ...]] | None:
    """Of a rival over settings that differ by their seed: gain (median, smallest, largest),
    permitted (the same) and the median and largest time over the limit; None if it did not run."""
    entries = [e for cell in cells for e in cell.entries if e.name == rival]
    if not entries:
        return None
    alone = len(entries) == 1
    gains = list(entries[0].ratio) if alone else [e.ratio.middle for e in entries]
    permitted, over = [e.permitted for e in entries], [e.over_limit for e in entries]
    middle = gains[0] if alone else median(gains)
    return {
        "gain": (middle, min(gains), max(gains)),
        "permitted": (median(permitted), min(permitted), max(permitted)),
        "over": (median(over), max(over)),
    }


def family(name: str) -> str:
    """A rival without its number of head chunks."""
    return re.sub(r", \d+ head chunks", "", name)


def _summary(cells: Sequence[Compared]) -> str:
    """A row per setting, a column for each way beside the base; of head chunks the fastest."""
    bases = {family(cell.base) for cell in cells}
    ways = dict.fromkeys(family(e.name) for cell in cells for e in cell.entries)
    ways = [way for way in ways if bases != {way}]
    lines = [
        f"| setting | base (over the limit) | {' | '.join(ways)} |",
        "|-|-|" + "-|" * len(ways),
    ]
    for setting, some in groupby(sorted(cells, key=group), key=group):
        batch = list(some)
        count = f", {len(batch)} batches" * (len(batch) > 1)
        first = summarized(batch, batch[0].base)
        assert first is not None
        columns = [_column(batch, way) for way in ways]
        lines.append(
            f"| {setting}{count} | {batch[0].base} ({first['over'][0]:.2f}) | "
            f"{' | '.join(columns)} |"
        )
    return "\n".join(lines)


def _column(batch: Sequence[Compared], way: str) -> str:
    """ "2.00 (1.50 to 2.50), permitted 2.20 (1.10 over the limit)": of the fastest of this way."""
    fastest = [
        min(some, key=lambda e: median(e.seconds)).name
        for cell in batch
        if (some := [e for e in cell.entries if family(e.name) == way])
    ]
    if not fastest or family(batch[0].base) == way:
        return ""
    found = summarized(batch, fastest[0])
    assert found is not None
    chunks = fastest[0].removeprefix(way)
    gain = "{:.2f} ({:.2f} to {:.2f})".format(*found["gain"])
    return (
        f"{gain}, permitted {found['permitted'][0]:.2f}, over the limit {found['over'][0]:.2f}"
        f"{chunks}"
    )

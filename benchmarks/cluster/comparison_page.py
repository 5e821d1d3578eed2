"""Comparisons to be read: a summary between markers of a page, and every number beside it.

A row of the summary is a setting; batches of packed documents that differ by their seed alone are
one row, whose numbers are medians over the batches.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median, quantiles

from . import comparison, layouts_page
from .comparison import Compared, Comparisons, Entry, headline
from .document import COMPARED, replaced
from .suites import SUITES

READING = """\
*Gain* is the time of the base over that of the rival, run by run: the median, and the smallest and
largest of the runs (of documents: of the batches). *Permitted* is what the bytes permit: the base's
limit over the rival's. *Over the limit* is the time over max(compute, links), at the bytes of the
busiest interface and the highest rate that a plain transfer or any rival reached."""
NUMBERS = """\
*Seconds*: forward and backward, the median and the quartiles of the runs. *Between nodes*: MiB that
a rank sends to other nodes, the mean, the busiest rank, and the mean if every row crossed once to
each node that wants it and its gradient once from there (of one travelling side). *Message*: the
average size by link class. *Kernel*: bytes that the kernel counted over the formula's; where
messages are smaller than 64 KiB, headers weigh more. *Load*: of the machine, meanwhile."""


def appendix(page: Path) -> Path:
    """The file with every number."""
    return page.with_name(f"{page.stem}-comparisons.md")


def data(page: Path) -> Path:
    """The file that both are made from."""
    return page.with_name(f"{page.stem}-comparisons.json")


def write(found: Comparisons, page: Path) -> None:
    """The page's block, the appendix and the data; refuses a page that lacks the markers."""
    text = with_block(page.read_text() if page.exists() else None, block(found), page)
    comparison.save(found, data(page))
    appendix(page).write_text(everything(found, page))
    page.write_text(text)


def with_block(text: str | None, body: str, page: Path) -> str:
    """The page with its block of comparisons replaced."""
    return replaced(text, COMPARED, body, page)


def block(found: Comparisons) -> str:
    """A table per suite."""
    parts = [READING]
    for name, cells in _by_suite(found):
        parts += [f"**{SUITES[name].what[0].upper()}{SUITES[name].what[1:]}** (`{name}`)"]
        parts += [_summary(cells)]
        if name == "balanced":
            parts += [layouts_page.table(cells)]
    return "\n\n".join(parts) + "\n"


def everything(found: Comparisons, page: Path) -> str:
    """All settings, and the commands that measured them."""
    commands = [
        f"- Run {n}: `python -m benchmarks.cluster {run.command}`, on {run.machine}."
        + f" {run.note}" * bool(run.note)
        for n, run in enumerate(found.runs, 1)
    ]
    parts = [
        "# Comparisons on the emulated cluster",
        f"`python -m benchmarks.cluster compared --doc {page.name}` writes this page from "
        f"`{data(page).name}`; what the numbers say is in [{page.name}]({page.name}).",
        READING,
        NUMBERS,
        "## Commands",
        "\n".join(commands),
    ]
    for name, cells in _by_suite(found):
        parts += [f"## {SUITES[name].what[0].upper()}{SUITES[name].what[1:]}"]
        parts += [_numbers(cell) for cell in cells]
    return "\n\n".join(parts) + "\n"


def _by_suite(found: Comparisons) -> Iterator[tuple[str, list[Compared]]]:
    for name in SUITES:
        cells = [cell for cell in found.cells if cell.suite == name]
        if cells:
            yield name, cells


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


def _numbers(cell: Compared) -> str:
    lines = [
        f"**{headline(cell)}** (run {cell.run + 1}, load {cell.load:g}, links reached "
        f"{', '.join(f'{link} {rate:g}' for link, rate in cell.reached.items())} Mbit/s)",
        "",
        "| | seconds | forward + backward | gain | permitted | limit | over the limit | "
        "MiB between nodes: mean, busiest, least | MiB within: mean, busiest | message | kernel | "
        "predicted |",
        "|-|-|-|-|-|-|-|-|-|-|-|-|",
        *map(_row, cell.entries),
    ]
    return "\n".join([*lines, *(f"\n{text}" for text in cell.left_out)])


def _row(e: Entry) -> str:
    times = sorted(e.seconds)
    low, middle, high = quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    sizes = ", ".join(f"{link} {size:g} KiB" for link, size in e.messages.items())
    extra = ", ".join(f"{link} {x:+.1f}%" for link, x in e.extra.items())
    return (
        f"| {e.name} | {middle:.3f} ({low:.3f} to {high:.3f}) | {e.forward:.3f} + {e.backward:.3f} "
        f"| {e.ratio} | {e.permitted:.2f} | {e.limit:.3f} | {e.over_limit:.2f} | "
        f"{e.between[0]:.2f}, {e.between[1]:.2f}, {e.least:.2f} | "
        f"{e.within[0]:.2f}, {e.within[1]:.2f} | {sizes} | {extra} | "
        f"{'' if e.predicted is None else f'{e.predicted:.3f}'} |"
    )

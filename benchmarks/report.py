"""Shared helpers of benchmarks: provenance, interleaved timing, tables, sections of pages.

Every figure is written with its command, date, machine and spread.
"""

from __future__ import annotations

import io
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

DOCS = Path(__file__).resolve().parent.parent / "docs"
TERMINAL = Console(stderr=True)

Runs = dict[str, Callable[[], object]]


def provenance() -> str:
    """Return command, date, versions and kind of machine as one sentence."""
    command = " ".join(["python", "benchmarks/" + Path(sys.argv[0]).name, *sys.argv[1:]])
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    return (
        f"`{command}`, {date.today()}, {os.cpu_count()}-core CPU machine shared with other jobs "
        f"(load {load:.1f} at the end), {torch.get_num_threads()} thread, Python "
        f"{platform.python_version()}, torch {torch.__version__}."
    )


def machine() -> str:
    """Return cores, kernel and versions of a Linux machine, with the date, without names."""
    with open("/proc/cpuinfo") as file:
        models = [x.split(": ", 1)[1].strip() for x in file if x.startswith("model name")]
    return (
        f"{os.cpu_count()} cores ({models[0] if models else platform.machine()}), Linux "
        f"{platform.release().split('-')[0]}, Python {platform.python_version()}, torch "
        f"{torch.__version__}, {date.today()}"
    )


class Ratio(NamedTuple):
    """Median, smallest and largest ratio of two runs, round by round."""

    middle: float
    least: float
    most: float

    @classmethod
    def of(cls, above: Sequence[float], below: Sequence[float]) -> Ratio:
        """Return the ratio of times that were measured in the same rounds."""
        ratios = [a / b for a, b in zip(above, below, strict=True)]
        return cls(statistics.median(ratios), min(ratios), max(ratios))

    def __str__(self) -> str:
        return f"{self.middle:.2f} ({self.least:.2f} to {self.most:.2f})"


def interleaved(
    runs: Runs, repeats: int, patience: float = float("inf")
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return seconds of each run, wall time and processor time, after a warm-up round.

    Runs are ordered A B C A B C ..., so that other load slows all of them; ratios are taken within
    a round (`ratio`). Processor time is the time of this thread, without other jobs.

    Args:
        patience: Seconds after which three rounds are enough.
    """
    clocks = time.perf_counter, time.thread_time
    wall: dict[str, list[float]] = {name: [] for name in runs}
    cpu: dict[str, list[float]] = {name: [] for name in runs}
    begin = time.perf_counter()
    for repeat in range(1 + repeats):
        if repeat > 3 and time.perf_counter() - begin > patience:
            break
        for name, run in runs.items():
            start = [clock() for clock in clocks]
            run()
            taken = [clock() - begun for clock, begun in zip(clocks, start, strict=True)]
            if repeat:
                wall[name].append(taken[0])
                cpu[name].append(taken[1])
    return wall, cpu


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return lower quartile, median, upper quartile; a single value three times."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def ratio(times: dict[str, list[float]], above: str, below: str) -> str:
    """Return the ratio of two runs, round by round: median [lower quartile, upper quartile]."""
    pairs = zip(times[above], times[below], strict=True)
    return spread([a / b for a, b in pairs], ".3f")


def spread(values: Sequence[float], digits: str = ".2f") -> str:
    """Format as "median [lower quartile, upper quartile]"."""
    low, middle, high = quartiles(values)
    return f"{middle:{digits}} [{low:{digits}}, {high:{digits}}]"


def milliseconds(seconds: Sequence[float]) -> str:
    """Format as "median [lower quartile, upper quartile]" in milliseconds."""
    values = [1e3 * duration for duration in seconds]
    return spread(values, ".3g" if max(values) < 1000 else ".0f")


def human(count: int) -> str:
    """Format a number of tokens: 4K for 4096."""
    return f"{count // 1024}K" if count >= 1024 and count % 1024 == 0 else str(count)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table whose columns line up in the source."""
    table = Table(box=box.MARKDOWN)
    for column in columns:
        table.add_column(Text(column))
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console = Console(file=io.StringIO(), width=10_000, color_system=None)  # never wraps
    with console.capture() as text:
        console.print(table)
    return text.get().strip()


def json_record(record: Mapping[str, object]) -> str:
    """Return a record as JSON, with one line per list entry."""
    entries = []
    for name, value in record.items():
        text = json.dumps(value, ensure_ascii=False)
        if isinstance(value, (list, tuple)) and value:
            lines = (json.dumps(entry, ensure_ascii=False) for entry in value)
            text = "[\n  " + ",\n  ".join(lines) + "\n ]"
        entries.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(entries) + "\n}"


def write_section(path: Path, name: str, text: str, opening: str = "") -> None:
    """Replace the text between the markers `name` of a page; create it, with `opening`."""
    begin, end = f"<!-- begin {name}: generated -->", f"<!-- end {name} -->"
    content = path.read_text() if path.exists() else opening.rstrip() + "\n"
    if begin not in content:
        content = f"{content.rstrip()}\n\n{begin}\n{end}\n"
    head, rest = content.split(begin, 1)
    _, tail = rest.split(end, 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{head}{begin}\n{text.strip()}\n{end}{tail}")
    TERMINAL.print(f"wrote {name} into {path.name}")


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """Yield a function that names the next step of a progress bar on the terminal."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=TERMINAL, transient=True) as bar:
        task = bar.add_task(title, total=total + 1)

        def step(what: str) -> None:
            bar.update(task, advance=1, description=f"{title}: {what}")

        yield step

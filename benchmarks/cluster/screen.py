"""What is seen while the benchmark runs, and how its records reach the disk.

A bar and a running line on a terminal, the tables as they come; records are written after every
cell, so an interrupted run loses one cell at most; at the end the figure and what it shows.
"""

from __future__ import annotations

import json
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import heatmap, results, table
from .bench import How, run_cells
from .cells import Cell, Rival
from .predict import estimate
from .ranks import RankError


def show(todo: Sequence[Cell], rivals: Sequence[Rival], how: How, out: Path) -> int:
    """Run the cells and print their tables; exit code 1 if a run was wrong."""
    console = Console() if sys.stdout.isatty() else Console(width=170)
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    records = []
    begun = {"command": shlex.join(sys.argv[1:]), "machine": machine()}
    hours = estimate(todo, rivals, how.repeats) / 3600
    console.print(f"{len(todo)} cells; about {hours:.1f} h" if hours > 1 else
                  f"{len(todo)} cells; about {60 * hours:.0f} min")  # fmt: skip
    with Progress(*columns, console=console, refresh_per_second=2, transient=True) as progress:
        steps = len(todo) * len(rivals) * how.repeats
        task = progress.add_task("starting the ranks", total=steps)

        def say(text: str) -> None:
            progress.update(task, description=text, advance=float("/" in text.split("(")[-1]))

        try:
            for record in run_cells(todo, rivals, how, say):
                records.append(record)
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_text(json.dumps(begun | {"cells": records}, indent=1))
                console.print(_table(record))
        except RankError as error:
            console.print(f"[bold red]a run was wrong:[/] {error}", markup=True)
            return 1
    settings = [table.setting(record) for record in records]
    results.save(settings, out.with_suffix(".csv"))
    heatmap.draw(settings, out.with_suffix(".png"))
    console.print(f"records: {out}; beside it {out.stem}.csv and the figure, {out.stem}.png")
    return 0


def machine() -> str:
    """What it ran on, without names."""
    with open("/proc/cpuinfo") as file:
        lines = file.read().splitlines()
    models = [line.split(": ", 1)[1] for line in lines if line.startswith("model name")]
    return (
        f"{len(models)} cores ({models[0] if models else platform.machine()}), Linux "
        f"{platform.release().split('-')[0]}, Python {platform.python_version()}, torch "
        f"{torch.__version__}, {time.strftime('%Y-%m-%d')}"
    )


def _table(record: dict[str, Any]) -> Table:
    shown = Table(title=table.headline(record), title_justify="left", title_style="bold")
    for name in (
        "",
        "median s",
        "quartiles",
        "fwd + bwd",
        "limit",
        "/limit",
        "/burst",
        "/fixed",
        "predicted",
        "bytes",
    ):
        shown.add_column(name, justify="right" if name else "left", no_wrap=True)
    for row in table.rows(record):
        shown.add_row(
            row.name, f"{row.middle:.3f}", f"{row.low:.3f}-{row.high:.3f}",
            f"{row.forward:.3f} + {row.backward:.3f}", f"{row.limit:.3f}",
            f"{row.over_limit:.2f}", f"{row.against.middle:.2f}", f"{row.fixed.middle:.2f}",
            "" if row.predicted is None else f"{row.predicted:.3f}",
            " ".join(f"{link} {extra:+.1f}%" for link, extra in row.extra.items()),
        )  # fmt: skip
    chosen = [f"{r['name']}: {r['chosen']}" for r in record["rivals"] if r.get("chosen")]
    shown.caption = "\n".join([*record["left out"], *chosen]) or None
    return shown

"""What is kept of a benchmark: one `Measured` per cell, and the runs that measured them, as JSON.

Numbers are rounded when a cell is made (`table.measured`) to the digits that are printed, so the
file, the tables, the page and the figure cannot differ. Nothing here computes anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from .cells import REGIMES


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


class Measured(NamedTuple):
    """All rivals in one cell. gflops: emulated compute per rank, None where it is real; reached:
    Mbit/s of each link class; run: index into `Results.runs`."""

    cell: dict[str, Any]  # the fields of `cells.Cell`, rates as text
    gflops: float | None
    reached: dict[str, float]
    rows: tuple[Row, ...]
    chosen: dict[str, str]  # rival -> what "auto" chose, and why
    left_out: tuple[str, ...]  # rivals that `mb.attention` refused
    run: int = 0

    @property
    def emulated(self) -> bool:
        """Does compute take time that was emulated?"""
        return REGIMES.get(self.cell["regime"], 0.0) > 0.0


class Run(NamedTuple):
    """One call of the benchmark: its arguments, the machine and the date; a note on its version."""

    command: str
    machine: str
    note: str = ""


class Results(NamedTuple):
    runs: tuple[Run, ...]
    cells: tuple[Measured, ...]

    def __add__(self, later: Results) -> Results:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The cells of both; those that came later keep their own command and machine."""
        shift = len(self.runs)
        moved = (cell._replace(run=cell.run + shift) for cell in later.cells)
        return Results(self.runs + later.runs, (*self.cells, *moved))


def load(path: Path) -> Results:
    data = json.loads(path.read_text())
    cells = (
        Measured(**cell | {"rows": tuple(_row(row) for row in cell["rows"]),
                           "left_out": tuple(cell["left_out"])})
        for cell in data["cells"]
    )  # fmt: skip
    return Results(tuple(Run(**run) for run in data["runs"]), tuple(cells))


def save(results: Results, path: Path) -> None:
    """One line per run, per head of a cell and per row: one number changed is one line changed."""
    cells = []
    for cell in results.cells:
        head = {name: value for name, value in cell._asdict().items() if name != "rows"}
        rows = _lines(_json(row._asdict()) for row in cell.rows)
        cells.append(f'{_json(head)[:-1]}, "rows": {rows}}}')
    runs = _lines(_json(run._asdict()) for run in results.runs)
    path.write_text(f'{{"runs": {runs},\n"cells": {_lines(cells)}}}\n')


def _row(row: dict[str, Any]) -> Row:
    return Row(**row | {"against": Ratio(*row["against"]), "fixed": Ratio(*row["fixed"])})


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _lines(values: Iterable[str]) -> str:
    return "[\n" + ",\n".join(values) + "\n]"

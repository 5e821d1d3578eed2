"""Stored results, such as `measured.csv`: a line of CSV per rival and setting.

The figure is drawn from it, and `benchmarks.advise.emulated` predicts it. `measured.csv` holds the
35 settings of docs/cluster.md, measured on 2026-11-21 by `python -m benchmarks.cluster bench`.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from . import table
from .cells import Cell
from .network import Rates
from .record import Record

MEASURED = Path(__file__).with_name("measured.csv")
CELL = ("nodes", "per_node", "rates", "heads", "regime", "tokens")


class Kept(NamedTuple):
    """One rival in one setting: median seconds of runs and passes, and two ratios.

    The ratios are its time relative to its own limit, and relative to the fastest rival that is not
    "auto".
    """

    rival: str
    seconds: float
    forward: float
    backward: float
    over_limit: float
    over_fixed: float


class Setting(NamedTuple):
    """All rivals in one cell; gflops is emulated compute per rank, None for real compute."""

    cell: Cell
    gflops: float | None
    rivals: tuple[Kept, ...]


def kept(record: Record) -> Setting:
    """Return the stored form of a cell's record: seconds in milliseconds, ratios in hundredths."""
    speed, cell = record["speed"], record["cell"]
    rows = tuple(
        Kept(row.name, *(round(x, 3) for x in (row.middle, row.forward, row.backward)),
             round(row.over_limit, 2), round(1 / row.gain.middle, 2))
        for row in table.rows(record, table.fastest(record))
    )  # fmt: skip
    gflops = None if speed is None else round(speed / 1e9, 1)
    return Setting(Cell(**cell | {"rates": Rates.parse(cell["rates"])}), gflops, rows)


def load(path: Path) -> list[Setting]:
    """Return the settings of a file, in its order."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    settings = []
    for _, group in groupby(rows, key=lambda row: row["setting"]):
        setting_rows = list(group)
        nodes, per_node, rates, heads, regime, tokens = (setting_rows[0][name] for name in CELL)
        cell = Cell(int(nodes), int(per_node), Rates.parse(rates), heads, regime, int(tokens))
        gflops = setting_rows[0]["gflops"]
        rivals = tuple(
            Kept(row["rival"], *(float(row[name]) for name in Kept._fields[1:]))
            for row in setting_rows
        )
        settings.append(Setting(cell, float(gflops) if gflops else None, rivals))
    return settings


def save(settings: Sequence[Setting], path: Path) -> None:
    """Write the file that `load` reads."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("setting", *CELL, "gflops", *Kept._fields))
        for number, (cell, gflops, rivals) in enumerate(settings):
            cell_columns = [str(getattr(cell, name)) for name in CELL]
            speed = "" if gflops is None else gflops
            writer.writerows((number, *cell_columns, speed, *rival) for rival in rivals)

"""Measure states of linear attention, print tables, and write records into runs/linear.

`python -m benchmarks.linear` takes ten minutes on two idle cores, with `--quick` two.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cluster.__main__ import ROOT, quiet, say, where_there_is_a_cluster
from benchmarks.cluster.enclosure import enclosed
from benchmarks.report import machine

from .settings import GRID, RATES, settings

PARTS = ("simulated", "cluster")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.linear", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few settings")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument("--repeats", type=int, help="runs of each rival (default: 3; quick: 2)")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "linear",
                        help="folder of what is written (default: runs/linear)")  # fmt: skip
    arguments = parser.parse_args(words)
    quiet()
    arguments.out.mkdir(parents=True, exist_ok=True)
    parts: dict[str, Callable[[], int]] = {
        "simulated": _simulated,
        "cluster": lambda: enclosed(lambda: _cluster(arguments)),
    }
    return where_there_is_a_cluster(lambda: max(parts[part]() for part in arguments.parts))


def _simulated() -> int:
    from . import simulated

    print(simulated.table())
    return 0


def _cluster(arguments: argparse.Namespace) -> int:
    from . import bench, tables

    chosen_settings = settings(arguments.quick)
    repeats = arguments.repeats or (2 if arguments.quick else 3)
    new_records = bench.run_settings(chosen_settings, GRID, RATES, repeats, say)
    records = _kept(new_records, arguments.out / "cluster.json")
    print(tables.cluster(records))
    return 0


def _kept(new_records: Iterator[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """Return the records; each is on disk as soon as it exists."""
    command, host = shlex.join(["python", "-m", "benchmarks.linear", *sys.argv[1:]]), machine()
    records = []
    for record in new_records:
        records.append(record)
        run = {"command": command, "machine": host, "cells": records}
        path.write_text(json.dumps(run, indent=1))
    loads = [x for record in records for x in record["load"]]
    print(f"\nMeasured by `{command}` on {host}, load {min(loads):.0f} to {max(loads):.0f}.\n")
    return records


if __name__ == "__main__":
    sys.exit(main())

"""`python -m benchmarks.linear`: measure, then write records, tables and the picture of
docs/linear-attention.md into runs/linear. Ten minutes on two idle cores; `--quick` takes two.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cluster.enclosure import Unavailable, enclosed

from .settings import GRID, RATES, Stack, settings

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "runs" / "linear"
PARTS = ("cluster", "hybrid")
REGIMES = ("communication", "balanced", "compute")


def main(words: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(words)
    # torch warns about every address that has no host name, and here none has
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    os.environ["OMP_NUM_THREADS"] = "1"
    parts = arguments.parts or PARTS
    out = arguments.out or RESULTS
    try:
        for part in parts if not arguments.page else ():
            if enclosed(lambda part=part: _measure(part, arguments)):
                return 1
    except Unavailable as error:
        print(f"no emulated cluster here: {error}", file=sys.stderr)
        return 2
    from . import page  # draws, and needs what measuring does not

    out.mkdir(parents=True, exist_ok=True)
    page.write(_known(out / "linear-attention.json", () if arguments.page else parts), out)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.linear", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few settings")
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="default: all")
    parser.add_argument("--repeats", type=int, help="runs of each rival (default: 3; quick: 2)")
    parser.add_argument("--page", action="store_true", help="measure nothing, write again")
    parser.add_argument("--out", type=Path, help="folder of what is written (default: runs/linear)")
    return parser


def _measure(part: str, arguments: argparse.Namespace) -> int:
    """Inside the cluster's namespaces: the records of one part, kept in runs/linear."""
    from benchmarks.cluster.screen import machine

    from . import bench, stacks

    repeats = arguments.repeats or (2 if arguments.quick else 3)
    begin = time.perf_counter()
    cells: list[Any] = []
    if part == "cluster":
        found = bench.run_settings(settings(arguments.quick), GRID, RATES, repeats, _say)
    else:
        regimes = REGIMES[:2] if arguments.quick else REGIMES
        found = stacks.run_stack(Stack(), regimes, GRID, RATES, repeats, _say)
    command = shlex.join(["python", "-m", "benchmarks.linear", *sys.argv[1:]])
    RESULTS.mkdir(parents=True, exist_ok=True)
    for cell in found:
        cells.append(cell)
        run = {"command": command, "machine": machine(), "cells": cells}
        (RESULTS / f"{part}.json").write_text(json.dumps(run, indent=1))
    _say(f"{part}: {time.perf_counter() - begin:.0f} s")
    return 0


def _known(path: Path, parts: Sequence[str]) -> dict[str, Any]:
    """What is kept of all parts, with the new records of these."""
    known = json.loads(path.read_text()) if path.exists() else {}
    for part in parts:
        records = RESULTS / f"{part}.json"
        if records.exists():
            known[part] = json.loads(records.read_text())
    lines = [f'"{name}": {_compact(each)}' for name, each in known.items()]
    path.write_text("{" + ",\n".join(lines) + "}\n")
    return known


def _compact(run: dict[str, Any]) -> str:
    """One line per cell's head and per rival."""
    cells = []
    for cell in run["cells"]:
        many = "rivals" if "rivals" in cell else "attentions"
        head = {name: value for name, value in cell.items() if name != many}
        rows = ",\n".join(json.dumps(row) for row in cell[many])
        cells.append(f'{json.dumps(head)[:-1]}, "{many}": [\n{rows}]}}')
    rest = {name: value for name, value in run.items() if name != "cells"}
    return f'{json.dumps(rest)[:-1]}, "cells": [\n' + ",\n".join(cells) + "]}"


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())

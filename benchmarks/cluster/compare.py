"""The command `compare`: runs the settings of suites and says what they show.

Records reach the disk after every setting; `--append` adds to those that are there.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .cells import Cell
from .enclosure import enclosed
from .network import Rates
from .suites import SUITES, Suite, cells


def add(commands: argparse._SubParsersAction, out: Path) -> None:
    """Enter `compare` among the commands."""
    parser = commands.add_parser("compare", help=f"rivals side by side: {', '.join(SUITES)}")
    parser.set_defaults(run=run)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help="default: all of them")
    parser.add_argument("--grids", help="nodes x ranks, comma-separated (default: the suite's)")
    parser.add_argument("--rates", help="inter/intra bit/s (default: the suite's)")
    parser.add_argument("--masks", help="only those whose name contains one of A,B,...")
    parser.add_argument("--wirings", help="only these, comma-separated")
    parser.add_argument("--wires", help="only these, comma-separated")
    parser.add_argument("--regimes", help="only these, comma-separated")
    parser.add_argument("--rivals", default="", help="only those whose name contains A,B,...")
    parser.add_argument("--seeds", default="0-11", help="of packed documents (default: 0-11)")
    parser.add_argument("--tokens", type=int, help="per rank (default: the suite's)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each (default: 3)")
    parser.add_argument("--forecast", action="store_true", help="also say what is predicted")
    parser.add_argument("--out", type=Path, default=out / "compared.json", help="JSON to write")
    parser.add_argument("--append", action="store_true", help="add to the settings that it has")


def run(arguments: argparse.Namespace) -> int:
    names = list(SUITES) if arguments.suites in ([], ["all"]) else arguments.suites
    if unknown := [name for name in names if name not in SUITES]:
        raise ValueError(f"compare: there is {', '.join(SUITES)}, got {', '.join(unknown)}")
    jobs = [(name, *_job(SUITES[name], arguments)) for name in names]

    def inside() -> int:
        return _measure(jobs, arguments)

    if arguments.append and not arguments.out.exists():
        raise ValueError(f"--append: {arguments.out} does not exist")
    return enclosed(inside)


def _job(suite: Suite, arguments: argparse.Namespace) -> tuple[Suite, list[Cell]]:
    """A suite as the arguments narrow it down, and its settings."""
    suite = suite._replace(
        rivals=tuple(r for r in suite.rivals if _wanted(r.name, arguments.rivals)),
        wirings=tuple(x for x in suite.wirings if _wanted(x, arguments.wirings)),
        wires=tuple(x for x in suite.wires if _wanted(x, arguments.wires)),
        regimes=tuple(x for x in suite.regimes if _wanted(x, arguments.regimes)),
        masks=tuple(x for x in suite.masks if _wanted(x, arguments.masks)),
        tokens=arguments.tokens or suite.tokens,
    )
    grids = (tuple(map(int, g.split("x"))) for g in (arguments.grids or suite.grids).split(","))
    rates = [Rates.parse(text) for text in (arguments.rates or suite.rates).split(",")]
    first, _, last = arguments.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    return suite, cells(suite, [(n, w) for n, w in grids], rates, seeds)


def _wanted(name: str, given: str | None) -> bool:
    return not given or any(word.strip() in name for word in given.split(","))


def _measure(jobs: Sequence[tuple[str, Suite, list[Cell]]], arguments: argparse.Namespace) -> int:
    from . import comparison, whole
    from .bench import How, run_cells
    from .ranks import RankError
    from .screen import machine

    whole.register()  # for what is predicted
    kept = comparison.load(arguments.out) if arguments.append else comparison.EMPTY
    now = comparison.Run(shlex.join(sys.argv[1:]), machine())
    kept = kept._replace(runs=(*kept.runs, now))
    for name, suite, todo in jobs:
        how = How(arguments.repeats, best=suite.best, forecast=arguments.forecast)
        started = time.time()
        try:
            for record in run_cells(todo, suite.rivals, how, _say):
                found = comparison.compared(name, record, suite.base)
                load = round(os.getloadavg()[0], 1)
                found = found._replace(run=len(kept.runs) - 1, load=load)
                print(comparison.lines(found), flush=True)
                kept = kept._replace(cells=(*kept.cells, found))
                comparison.save(kept, arguments.out)
        except RankError as error:
            print(f"a run was wrong: {error}", file=sys.stderr)
            return 1
        print(f"{name}: {len(todo)} settings in {time.time() - started:.0f} s", flush=True)
    print(comparison.summary(kept))
    print(f"records: {arguments.out}")
    return 0


def _say(text: str) -> None:
    print(f"  {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)

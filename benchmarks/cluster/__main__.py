"""Command line of the emulated cluster: `python -m benchmarks.cluster --help`."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.report import machine

from .cells import HEADS, REGIMES, Cell
from .enclosure import Unavailable, enclosed
from .network import WIRINGS
from .problems import DOCUMENTS
from .results import MEASURED, kept, load, save
from .suites import EVERY, FULL, SUITES, Suite, cells

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "runs" / "cluster"
SETTINGS = ("grids", "rates", "heads", "regimes", "tokens")  # set by the command line
NARROWED = ("rivals", "masks", "wirings", "wires")  # only names that contain one of A,B,...
Arguments = argparse.Namespace


def main() -> int:
    arguments = parser().parse_args()
    quiet()
    return where_there_is_a_cluster(lambda: arguments.run(arguments))


def quiet() -> None:
    """Silence warnings of all processes that start after this call."""
    # torch warns about every address without a host name; here no address has one
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    os.environ["OMP_NUM_THREADS"] = "1"


def where_there_is_a_cluster(run: Callable[[], int]) -> int:
    """Return the exit status of `run`; print the reason and return 2 if no cluster is possible."""
    try:
        return run()
    except Unavailable as error:
        print(f"no emulated cluster here: {error}", file=sys.stderr)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
    return 2


def say(text: str) -> None:
    """Print progress to stderr; tables go to stdout."""
    print(f"  {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    root_parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description=__doc__)
    commands = root_parser.add_subparsers(required=True, metavar="COMMAND")
    check = commands.add_parser("check", help="can this machine emulate a cluster?")
    check.set_defaults(run=_check)
    check.add_argument("--wiring", default="nic", choices=(*WIRINGS,), help="default: nic")
    bench = commands.add_parser("bench", help="every algorithm; tables, records and a figure")
    bench.set_defaults(run=_bench, forecast=True, append=False, seeds="0")
    bench.add_argument("--full", action="store_true", help="every cell; predicted: 2.5 hours")
    compare = commands.add_parser("compare", help=f"rivals side by side: {', '.join(SUITES)}")
    compare.set_defaults(run=_compare)
    compare.add_argument("suites", nargs="*", metavar="SUITE", help="default: all of them")
    compare.add_argument("--seeds", default="0-11", help="of packed documents (default: 0-11)")
    compare.add_argument("--forecast", action="store_true", help="also say what is predicted")
    compare.add_argument("--append", action="store_true", help="add to the records that there are")
    for command, file in ((bench, "results"), (compare, "compared")):
        _add_settings(command)
        command.add_argument("--out", type=Path, default=RESULTS / f"{file}.json", metavar="X.json",
                             help="to write; of bench X.csv and X.png, too")  # fmt: skip
    for command in (bench, compare):
        command.add_argument("--repeats", type=int, help="runs of each (default: 3; full: 5)")
        for name in NARROWED:
            command.add_argument(f"--{name}", help="only those whose name contains one of A,B,...")
    steps = commands.add_parser("steps", help="whole training steps of a small Llama, 2 x 2 ranks")
    steps.set_defaults(run=_steps)
    steps.add_argument("--rates", default="50M/200M", help="inter/intra bit/s (50M/200M)")
    steps.add_argument(
        "--documents", default=",".join(DOCUMENTS), help=f"of {', '.join(DOCUMENTS)}"
    )
    steps.add_argument("--tokens", type=int, default=2048, help="per rank (2048)")
    steps.add_argument("--packs", type=int, default=1, help="of a step (1)")
    steps.add_argument("--rounds", type=int, default=2, help="of all ways in turn (2)")
    steps.add_argument("--steps", type=int, default=2, help="timed in each round (2)")
    chart = commands.add_parser("chart", help="draw the figure of docs/cluster.md, or another")
    chart.set_defaults(run=_chart)
    chart.add_argument("--csv", type=Path, nargs="+", default=[MEASURED], help="of `bench`, joined")
    chart.add_argument("--png", type=Path, default=ROOT / "docs" / "cluster.png", help="to write")
    faults = commands.add_parser("faults", help="kill ranks and links; what do survivors say?")
    faults.set_defaults(run=_faults)
    faults.add_argument("--only", default="", help='part of "RIVAL, FAULT"')
    return root_parser


def _add_settings(command: argparse.ArgumentParser) -> None:
    """Add options that override the settings of a suite."""
    add = command.add_argument
    add("--grids", help="nodes x ranks, comma-separated")
    add("--rates", help="inter/intra bit/s, comma-separated")
    add("--heads", help=f"of {', '.join(HEADS)}")
    add("--regimes", help=f"of {', '.join(REGIMES)} (emulated compute) and real")
    add("--tokens", type=int, help="per rank")


def settings(suite: Suite, arguments: Arguments) -> tuple[Suite, list[Cell]]:
    """Return a suite with the changes of the arguments, and its cells."""
    changes = {name: value for name in SETTINGS if (value := getattr(arguments, name)) is not None}
    for name in NARROWED:
        words, choices = getattr(arguments, name, None), getattr(suite, name)
        changes[name] = tuple(
            x for x in choices
            if not words or any(w.strip() in getattr(x, "name", x) for w in words.split(","))
        )  # fmt: skip
        if not changes[name]:
            names = [getattr(x, "name", x) for x in choices]
            raise ValueError(f"--{name} {words}: there is {', '.join(names)}")
    suite = suite._replace(**changes)
    first_seed, _, last_seed = getattr(arguments, "seeds", "0").partition("-")
    return suite, cells(suite, range(int(first_seed), int(last_seed or first_seed) + 1))


def _check(arguments: Arguments) -> int:
    from . import trial

    return enclosed(lambda: trial.main(arguments.wiring))


def _bench(arguments: Arguments) -> int:
    flags = [f"--{name}" for name in (*SETTINGS, "repeats") if getattr(arguments, name) is not None]
    if arguments.full and flags:
        raise ValueError(f"--full sets the cells and repeats; remove {', '.join(flags)}")
    arguments.repeats = arguments.repeats or (5 if arguments.full else 3)
    job = settings(FULL if arguments.full else EVERY, arguments)

    def inside() -> int:
        from . import heatmap
        from .predict import estimate

        seconds = estimate(job[1], job[0].rivals, arguments.repeats)
        say(f"{len(job[1])} cells; about {seconds / 60:.0f} min")
        records = _measured({"bench": job}, arguments)
        if records is None:
            return 1
        kept_settings = [kept(record) for record in records if record["rivals"]]
        out = arguments.out
        save(kept_settings, out.with_suffix(".csv"))
        if kept_settings:
            heatmap.draw(kept_settings, out.with_suffix(".png"))
        return _verdict(records)

    return enclosed(inside)


def _compare(arguments: Arguments) -> int:
    names = list(SUITES) if arguments.suites in ([], ["all"]) else arguments.suites
    if unknown_suites := [name for name in names if name not in SUITES]:
        raise ValueError(f"compare: there is {', '.join(SUITES)}, got {', '.join(unknown_suites)}")
    if arguments.append and not arguments.out.exists():
        raise ValueError(f"--append: {arguments.out} does not exist")
    arguments.repeats = arguments.repeats or 3
    jobs = {name: settings(SUITES[name], arguments) for name in names}

    def inside() -> int:
        from . import table

        records = _measured(jobs, arguments)
        if records is None:
            return 1
        for name, suite in SUITES.items():
            if suite_records := [record for record in records if record["suite"] == name]:
                suite_table = table.summary(suite_records, suite.base)
                if suite.ours:
                    suite_table = table.beside(suite_records, suite.ours, suite.base, suite.targets)
                print(f"{suite.what} ({name})\n\n{suite_table}\n")
        return _verdict(records)

    return enclosed(inside)


def _verdict(records: list[dict[str, Any]]) -> int:
    """Print the refused rivals and return the exit status.

    The status is 1 if results or bytes of a rival were wrong. A rival that cannot run in a setting
    does not count as a failure.
    """
    from . import table

    if lines := table.refusals(records):
        print(lines)
    wrong_count = sum(refusal["wrong"] for record in records for refusal in table.refused(record))
    if wrong_count:
        print(f"{wrong_count} refused for wrong results", file=sys.stderr)
    return int(wrong_count > 0)


def _measured(
    jobs: dict[str, tuple[Suite, list[Cell]]], arguments: Arguments
) -> list[dict[str, Any]] | None:
    """Return old and new records, None if ranks failed; each cell is written to disk at once."""
    from . import table, whole
    from .bench import run_cells
    from .ranks import RankError

    whole.register()  # for predictions
    out, run_info = arguments.out, {"command": shlex.join(sys.argv[1:]), "machine": machine()}
    records = json.loads(out.read_text())["cells"] if arguments.append else []
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        for name, (suite, suite_cells) in jobs.items():
            for record in run_cells(suite_cells, suite, arguments.repeats, arguments.forecast, say):
                records.append(run_info | {"suite": name} | record)
                out.write_text(json.dumps({"cells": records}, indent=1))
                print(f"{table.shown(record, table.fastest(record, suite.base))}\n", flush=True)
    except RankError as error:
        print(f"ranks failed: {error}", file=sys.stderr)
        return None
    say(f"records: {out}")
    return records


def _steps(arguments: Arguments) -> int:
    kinds = arguments.documents.split(",")
    if unknown_kinds := [kind for kind in kinds if kind not in DOCUMENTS]:
        raise ValueError(f"--documents: there is {', '.join(DOCUMENTS)}, got {unknown_kinds[0]!r}")

    os.environ["PYTHONWARNINGS"] = "ignore"  # every rank would repeat Megatron's warnings

    def inside() -> int:
        from . import steps

        print(steps.measured(arguments.rates, kinds, arguments.tokens, arguments.packs,
                             arguments.rounds, arguments.steps, say))  # fmt: skip
        print(f"\n`{shlex.join(sys.argv[1:])}`; {machine()}; load {os.getloadavg()[0]:.1f}")
        return 0

    return enclosed(inside)


def _chart(arguments: Arguments) -> int:
    from . import heatmap

    heatmap.draw([setting for path in arguments.csv for setting in load(path)], arguments.png)
    print(f"wrote {arguments.png}")
    return 0


def _faults(arguments: Arguments) -> int:
    def inside() -> int:
        from . import faults

        return faults.main(arguments.only)

    return enclosed(inside)


if __name__ == "__main__":
    sys.exit(main())

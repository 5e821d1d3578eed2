"""Command line of the emulated cluster: `python -m benchmarks.cluster --help`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from . import compare
from .cells import HEADS, REGIMES, RIVALS, Cell, cells
from .enclosure import Unavailable, enclosed
from .network import WIRINGS, Rates
from .results import MEASURED, load

ROOT = Path(__file__).parents[2]
FULL = {
    "grids": "2x2,2x4,4x2",
    "rates": "200M/800M,1G/4G",
    "heads": "MHA,GQA 4:1",
    "regimes": "communication,balanced,compute,hidden,real",
    "tokens": 1024,
    "repeats": 5,
}
RESULTS = ROOT / "runs" / "cluster"


def main() -> int:
    arguments = _parser().parse_args()
    # torch warns about every address that has no host name, and here none has
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        return arguments.run(arguments)
    except Unavailable as error:
        print(f"no emulated cluster here: {error}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    check = commands.add_parser("check", help="can this machine emulate a cluster?")
    check.set_defaults(run=_check)
    check.add_argument("--wiring", default="nic", choices=(*WIRINGS,), help="default: nic")
    bench = commands.add_parser("bench", help="measure; tables here, records and a figure as files")
    bench.set_defaults(run=_bench)
    _add_cells(bench, "MHA", "communication,balanced,compute")
    bench.add_argument("--repeats", type=int, default=3, help="runs of each rival (default: 3)")
    bench.add_argument("--rivals", default="", help="only those whose name contains one of A,B,...")
    bench.add_argument("--out", type=Path, default=RESULTS / "results.json", metavar="X.json",
                       help="records to write; X.csv and the figure X.png beside them")  # fmt: skip
    bench.add_argument("--full", action="store_true", help="every cell; predicted: 2.5 hours")
    chart = commands.add_parser("chart", help="draw the figure of docs/cluster.md, or another")
    chart.set_defaults(run=_chart)
    chart.add_argument("--csv", type=Path, nargs="+", default=[MEASURED], help="of `bench`, joined")
    chart.add_argument("--png", type=Path, default=ROOT / "docs" / "cluster.png", help="to write")
    compare.add(commands, RESULTS)
    trace = commands.add_parser("trace", help="events of one run, for `megatron-burst trace`")
    trace.set_defaults(run=_trace)
    _add_cells(trace, "MHA", "balanced")
    trace.add_argument("--rival", default="burst query", help="default: burst query")
    trace.add_argument("--out", type=Path, default=RESULTS / "trace.json", help="JSON to write")
    faults = commands.add_parser("faults", help="kill ranks and links; what do survivors say?")
    faults.set_defaults(run=_faults)
    faults.add_argument("--only", default="", help='part of "RIVAL, FAULT"')
    return parser


def _add_cells(parser: argparse.ArgumentParser, heads: str, regimes: str) -> None:
    parser.add_argument("--grids", default="2x2", help="nodes x ranks, comma-separated")
    parser.add_argument("--rates", default="100M/400M", help="inter/intra bit/s, comma-separated")
    parser.add_argument("--heads", default=heads, help=f"of {', '.join(HEADS)}")
    parser.add_argument(
        "--regimes",
        default=regimes,
        help=f"of {', '.join(REGIMES)} (emulated compute) and real",
    )
    parser.add_argument("--tokens", type=int, default=512, help="per rank (default: 512)")


def _check(arguments: argparse.Namespace) -> int:
    from . import trial

    return enclosed(lambda: trial.main(arguments.wiring))


def _bench(arguments: argparse.Namespace) -> int:
    wanted = [word.strip() for word in arguments.rivals.split(",") if word.strip()]
    rivals = [r for r in RIVALS if not wanted or any(word in r.name for word in wanted)]
    if not rivals:
        raise ValueError(f"--rivals {arguments.rivals}: there are {[r.name for r in RIVALS]}")
    if arguments.full:
        usual = vars(_parser().parse_args(["bench"]))
        given = [f"--{name}" for name in FULL if vars(arguments)[name] != usual[name]]
        if given:
            raise ValueError(f"--full says which cells and how often, got {', '.join(given)} too")
        vars(arguments).update(FULL)
    todo = _cells(arguments)

    def inside() -> int:
        from . import bench, screen

        return screen.show(todo, rivals, bench.How(arguments.repeats), arguments.out)

    return enclosed(inside)


def _chart(arguments: argparse.Namespace) -> int:
    from . import heatmap

    heatmap.draw([one for path in arguments.csv for one in load(path)], arguments.png)
    print(f"wrote {arguments.png}")
    return 0


def _cells(arguments: argparse.Namespace) -> list[Cell]:
    return list(
        cells(
            [_grid(text) for text in arguments.grids.split(",")],
            [Rates.parse(text) for text in arguments.rates.split(",")],
            _names("--heads", arguments.heads, (*HEADS,)),
            _names("--regimes", arguments.regimes, (*REGIMES, "real")),
            arguments.tokens,
        )
    )


def _trace(arguments: argparse.Namespace) -> int:
    named = [rival for rival in RIVALS if rival.name == arguments.rival]
    if not named:
        raise ValueError(f"--rival {arguments.rival}: there are {[r.name for r in RIVALS]}")
    cell, *more = _cells(arguments)
    if more:
        raise ValueError("a trace is of one cell: give one grid, rate, kind of heads and regime")

    def inside() -> int:
        from megatron_burst.tools.trace import record

        from . import bench

        record.save(bench.trace_cell(cell, named[0], print), arguments.out)
        print(f"megatron-burst trace --events {arguments.out} --png FILE")
        return 0

    return enclosed(inside)


def _faults(arguments: argparse.Namespace) -> int:
    def inside() -> int:
        from . import faults

        return faults.main(arguments.only)

    return enclosed(inside)


def _names(flag: str, text: str, known: tuple[str, ...]) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise ValueError(f"{flag}: there is {', '.join(known)}, got {name!r}")
    return names


def _grid(text: str) -> tuple[int, int]:
    nodes, _, per_node = text.strip().partition("x")
    if not (nodes.isdigit() and per_node.isdigit() and 1 < int(nodes) * int(per_node) <= 64):
        raise ValueError(f"--grids must look like 2x4 and hold 2 to 64 ranks, got {text!r}")
    return int(nodes), int(per_node)


if __name__ == "__main__":
    sys.exit(main())

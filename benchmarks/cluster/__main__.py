"""Command line of the emulated cluster: `python -m benchmarks.cluster --help`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from .cells import HEADS, REGIMES, RIVALS, cells
from .enclosure import Unavailable, enclosed
from .network import Rates

ROOT = Path(__file__).parents[2]
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
    bench = commands.add_parser("bench", help="measure; the table goes to docs/cluster.md")
    bench.set_defaults(run=_bench)
    _add_cells(bench)
    bench.add_argument("--repeats", type=int, default=5, help="runs of each rival (default: 5)")
    bench.add_argument("--rivals", default="", help="only those whose name contains one of A,B,...")
    bench.add_argument("--out", type=Path, default=RESULTS / "results.json", help="JSON to write")
    bench.add_argument("--append", action="store_true", help="add to the JSON that is there")
    bench.add_argument("--doc", type=Path, help="also write this Markdown file and a PNG beside it")
    faults = commands.add_parser("faults", help="kill ranks and links; what do survivors say?")
    faults.set_defaults(run=_faults)
    faults.add_argument("--only", default="", help='part of "RIVAL, FAULT"')
    return parser


def _add_cells(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--grids", default="2x4", help="nodes x ranks, comma-separated")
    parser.add_argument("--rates", default="200M/800M", help="inter/intra bit/s, comma-separated")
    parser.add_argument("--heads", default="MHA,GQA 4:1", help=f"of {', '.join(HEADS)}")
    parser.add_argument(
        "--regimes",
        default="communication,balanced,compute",
        help=f"of {', '.join(REGIMES)} (emulated compute) and real",
    )
    parser.add_argument("--tokens", type=int, default=512, help="per rank (default: 512)")


def _check(_: argparse.Namespace) -> int:
    from . import trial

    return enclosed(trial.main)


def _bench(arguments: argparse.Namespace) -> int:
    wanted = [word.strip() for word in arguments.rivals.split(",") if word.strip()]
    rivals = [r for r in RIVALS if not wanted or any(word in r.name for word in wanted)]
    if not rivals:
        raise ValueError(f"--rivals {arguments.rivals}: there are {[r.name for r in RIVALS]}")
    todo = list(
        cells(
            [_grid(text) for text in arguments.grids.split(",")],
            [Rates.parse(text) for text in arguments.rates.split(",")],
            _names("--heads", arguments.heads, (*HEADS,)),
            _names("--regimes", arguments.regimes, (*REGIMES, "real")),
            arguments.tokens,
        )
    )

    def inside() -> int:
        from . import screen

        return screen.show(todo, rivals, arguments.repeats, arguments.out, arguments.append)

    code = enclosed(inside)
    if code == 0 and arguments.doc:
        from . import document

        document.write(json.loads(arguments.out.read_text()), arguments.doc)
    return code


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

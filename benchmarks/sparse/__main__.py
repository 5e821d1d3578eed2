"""Benchmark of sparse attention: `python -m benchmarks.sparse`, all parts or `--parts`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.cluster.__main__ import quiet, say, where_there_is_a_cluster
from benchmarks.cluster.enclosure import enclosed
from benchmarks.report import machine

from .settings import REGIMES, Layer

PARTS = ("held", "simulated", "hybrid", "cluster")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sparse", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each rival (default: 5)")
    parser.add_argument("--regimes", nargs="+", choices=(*REGIMES,), default=(*REGIMES,))
    parser.add_argument("--rows", type=int, default=Layer().rows, help="of a rank of the cluster")
    parser.add_argument("--layout", default=Layer().layout, help="of the cluster (striped)")
    parser.add_argument("--tokens", type=int, default=8192, help="of `held` (default: 8192)")
    args = parser.parse_args(words)
    quiet()
    status = 0
    for part in args.parts:
        if part == "held":
            from . import held

            print(held.table(args.tokens), flush=True)
        elif part == "simulated":
            from . import simulated

            print(simulated.table(), flush=True)
        elif part == "hybrid":
            from . import hybrid

            print(f"{hybrid.bytes_table()}\n\n{hybrid.time_table()}", flush=True)
        elif part == "cluster":
            status = where_there_is_a_cluster(lambda: enclosed(lambda: _cluster(args)))
    return status


def _cluster(args: argparse.Namespace) -> int:
    from . import bench

    layer = Layer(rows=args.rows, layout=args.layout)
    records = bench.run(layer, args.regimes, args.repeats, say)
    loads = [load for record in records for load in record["load"]]
    print(bench.table(records))
    print(f"\nMeasured on {machine()}, load {min(loads):.0f} to {max(loads):.0f}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())

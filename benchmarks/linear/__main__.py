"""Command line: `python -m benchmarks.linear --help`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

from benchmarks.cluster.enclosure import Unavailable, enclosed

from .settings import GRID, RATES, settings

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "runs" / "linear"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.linear", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two settings, two runs of each rival")
    parser.add_argument("--repeats", type=int, help="runs of each rival (default: 5)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the records")
    arguments = parser.parse_args()
    # torch warns about every address that has no host name, and here none has
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    os.environ["OMP_NUM_THREADS"] = "1"
    repeats = arguments.repeats or (2 if arguments.quick else 5)

    def inside() -> int:
        from . import bench

        records = []
        begin = time.perf_counter()
        for record in bench.run_settings(settings(arguments.quick), GRID, RATES, repeats, print):
            records.append(record)
            arguments.out.mkdir(parents=True, exist_ok=True)
            (arguments.out / "cluster.json").write_text(json.dumps(records, indent=1))
        print(f"{time.perf_counter() - begin:.0f} s")
        return 0

    try:
        return enclosed(inside)
    except Unavailable as error:
        print(f"no emulated cluster here: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

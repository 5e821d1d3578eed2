"""Compare packed documents with published speeds, simulated, and write docs/packed-published.md.

`python -m benchmarks.packed.charts` writes record.json and the tables of the page.
`--parts` names the parts to simulate again; `--parts` without a name only writes the page.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import fit, page
from .kernel import kernels
from .rivals import RIVALS, Constants

RECORD = Path(__file__).with_name("record.json")


def fitted_rows(record: dict[str, Any]) -> None:
    """Store the constants, and every rival's cell with its prediction."""
    constants = fit.fitted_constants()
    record["constants"] = asdict(constants)
    record["kernel"] = [asdict(kernel) for kernel in kernels("FA3")]
    record["rivals"] = [
        {
            **cell._asdict(),
            "fitted": cell.fitted,
            "predicted": round(fit.predicted(cell, constants), 1),
        }
        for cell in fit.cells()
        if cell.rival in RIVALS
    ]


def ours_rows(record: dict[str, Any], packs: int) -> None:
    """Store our speeds, and the parts of their time."""
    from . import speeds

    record["ours"], record["parts"] = [], []
    for causal in (True, False):
        for ranks in fit.RANKS:
            rows, parts = speeds.simulated(ranks, causal, Constants(**record["constants"]), packs)
            record["ours"] += rows
            record["parts"] += parts
            print(ranks, causal, *(f"{r['name']} {r['fwd']}/{r['bwd']};" for r in rows), flush=True)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packed.charts", description=__doc__)
    names = ("fit", "ours")
    parser.add_argument("--parts", nargs="*", choices=names, default=list(names))
    parser.add_argument("--packs", type=int, default=20, help="of each size, of the published 20")
    args = parser.parse_args(words)
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    steps: dict[str, Callable[[], None]] = {
        "fit": lambda: fitted_rows(record),
        "ours": lambda: ours_rows(record, args.packs),
    }
    for name in names:
        if name in args.parts:
            steps[name]()
            RECORD.write_text(json.dumps(record, indent=0) + "\n")
    page.write(record)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Simulate packed documents, print tables and store results in runs/packed.

An interrupted run continues; `--fresh` starts again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from .forecast import METHODS, Forecast
from .setting import LENGTHS, Setting

RESULTS = Path(__file__).resolve().parents[2] / "runs" / "packed"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packed", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[64, 256, 1024])
    parser.add_argument("--seeds", type=int, nargs="+", default=[3, 3, 1], help="of each size")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--tokens", type=int, default=Setting.tokens, help="of a rank")
    parser.add_argument("--fresh", action="store_true", help="forget what was simulated before")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of records")
    args = parser.parse_args(words)
    store, setting = args.out / "packed.json", Setting(tokens=args.tokens)
    args.out.mkdir(parents=True, exist_ok=True)
    results = json.loads(store.read_text()) if store.exists() and not args.fresh else {}
    results.setdefault("steps", [])
    for size, seeds in zip(args.ranks, args.seeds, strict=False):
        steps(Forecast(setting, size), seeds, args.methods, results, store)
    store.write_text(json.dumps(results, indent=0))
    from . import tables  # needs packages that the simulation does not need

    print(f"\nSimulated, not measured. Assumed: {setting}\n\n{tables.shown(results)}")
    return 0


def steps(
    forecast: Forecast, seeds: int, methods: Sequence[str], results: dict, store: Path
) -> None:
    """Simulate missing results; all methods of a batch before the next batch."""
    stored_keys = {(x["ranks"], x["lengths"], x["seed"], x["method"]) for x in results["steps"]}
    for seed in range(seeds):
        for kind in LENGTHS:
            lengths = forecast.draw(kind, seed)
            for method in methods:
                key = (forecast.ranks, kind.name, seed, method)
                if key in stored_keys:
                    continue
                begin = time.process_time()
                step = forecast.step(method, kind, lengths)
                if step is None:
                    continue
                cell = dict(zip(("ranks", "lengths", "seed"), key, strict=False)) | asdict(step)
                cell["ideal"] = forecast.ideal(lengths)
                cell["simulated"] = round(time.process_time() - begin, 1)
                cell["rate"] = forecast.tokens_per_second(step.layer)
                results["steps"].append(cell)
                store.write_text(json.dumps(results, indent=0))
                share = cell["ideal"] / step.layer
                print(
                    *key, f"{share:.2f} of ideal;", step.note, f"{cell['simulated']} s", flush=True
                )


if __name__ == "__main__":
    raise SystemExit(main())

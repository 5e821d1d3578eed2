"""`make fuzz ARGS='attention --seed 1 --seconds 600'`: search, or replay one case."""

import argparse
import importlib
import sys
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).parents[1] / "helpers")
)  # the oracles and the ranks of the tests

PARTS = ("misuse", "attention", "lm_head", "gloo", "faults")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; default: all"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each part")
    parser.add_argument("--replay", metavar="CASE", help="only this case of one part")
    given = parser.parse_args()
    parts = given.parts or PARTS
    if strange := {*parts} - {*PARTS}:
        parser.error(f"no part {', '.join(sorted(strange))}; there are {', '.join(PARTS)}")
    if given.replay is not None and len(parts) != 1:
        parser.error("--replay needs the part that the case is of")
    import torch

    torch.set_num_threads(1)
    failed = []
    for name in parts:
        part = importlib.import_module(f"{__package__}.{name}")
        if given.replay is not None and not hasattr(part, "replay"):
            parser.error(f"--replay: {name} has none; run it with --seed {given.replay}")
        bad = (
            part.replay(given.replay)
            if given.replay is not None
            else part.run(given.seed, given.seconds)
        )
        failed += [name] * bool(bad)
    print(f"FAILED: {', '.join(failed)}" if failed else f"passed: {', '.join(parts)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())

"""`make fuzz ARGS='attention --seed 1 --seconds 600'`: search, or replay one case."""

import argparse
import importlib
import sys
from pathlib import Path

# the oracles and the ranks of the tests
sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

PARTS = ("misuse", "attention", "sparse", "compressed", "lm_head", "gloo", "faults")
MORE = ("nccl",)  # only when asked for


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help=f"{', '.join(PARTS)}, which are the default, or {', '.join(MORE)}",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each part")
    parser.add_argument("--replay", metavar="CASE", help="only this case of one part")
    given = parser.parse_args()
    parts = given.parts or PARTS
    if strange := {*parts} - {*PARTS, *MORE}:
        parser.error(f"no part {', '.join(sorted(strange))}; there are {', '.join(PARTS + MORE)}")
    if given.replay is not None and len(parts) != 1:
        parser.error("--replay needs the part that the case is of")
    import torch

    torch.set_num_threads(1)
    if "nccl" in parts and not torch.cuda.is_available():
        parser.error("nccl wants a GPU, and there is none here; gloo tries such calls on the CPU")
    failed = [name for name in parts if search(name, given)]
    print(f"FAILED: {', '.join(failed)}" if failed else f"passed: {', '.join(parts)}")
    return bool(failed)


def search(name: str, given: argparse.Namespace) -> bool:
    """Try the cases of a part, by number until the time is over or all that it lists; print what
    was found: did any fail?"""
    from .tally import Pools, numbers

    part = importlib.import_module(f"{__package__}.{name}")
    pools = Pools("nccl" if name == "nccl" else "gloo")
    listed = getattr(part, "ALL", None)
    if given.replay is not None:
        cases = [given.replay if listed else int(given.replay)]
    else:
        cases = listed or numbers(given.seed, given.seconds, name)
    try:
        tally = part.search(cases, pools)
    finally:
        pools.close()
    print(tally)
    return bool(tally.failures)


if __name__ == "__main__":
    sys.exit(main())

"""Megatron-LM with our flags beside Megatron-LM as it stands: `make parity`.

Every combination of `combinations.py` trains a few iterations on forked ranks; what Megatron writes
to TensorBoard (losses of training and validation, of experts and further heads, norms) must be that
of stock, at the precision of the event files, which is float32. Needs `megatron.training` from 0.19
on, that is Python 3.12. Prints each result as it comes, then a table; exit status 1 on a miss.

    python tests/parity/parity.py [NAME ...]      # combinations whose name contains one of these
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from combinations import COMBINATIONS, Combination
from ranks import COMMON, Ranks

# Relative. Runs differ by the order of fp32 sums alone: some 1e-7 per step, in the loss as in the
# file's own rounding (6e-8), and a few times more in a norm or after steps of the optimizer.
TOLERANCE = 2e-6
LIMIT = 600  # seconds of a run, on a busy machine
EVERY = (
    "--train-iters 3 --eval-interval 3 --eval-iters 1 --global-batch-size 4 "
    "--distributed-timeout-minutes 10 --log-params-norm"
)
Scalars = dict[str, dict[int, float]]


class Result(NamedTuple):
    """The worst relative difference from stock, where it is, and what is allowed there."""

    combination: Combination
    worst: float
    where: str
    allowed: float
    seconds: float

    @property
    def good(self) -> bool:
        return self.worst <= self.allowed

    def line(self) -> str:
        verdict = "ok  " if self.good else "MISS"
        return (
            f"{verdict} {self.combination.name:38} {self.worst:7.1e} of {self.allowed:7.1e}  "
            f"{self.where:32} {self.seconds:5.0f} s"
        )


class Bench:
    """Runs of training, remembered by their flags, and compared."""

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        self.ranks, self.folder = ranks, folder
        self._known: dict[tuple[int, str], Scalars] = {}

    def scalars(self, world: int, flags: str) -> Scalars:
        """What a run on `world` ranks wrote; RuntimeError with its output if it failed."""
        if (world, flags) not in self._known:
            events = self.folder / str(len(self._known))
            words = f"{EVERY} {flags} --tensorboard-dir {events}".split()
            done = self.ranks.run(world, [*COMMON, *words], limit=LIMIT)
            if done.codes != [0] * world:
                raise RuntimeError(f"{flags}: ranks ended with {done.codes}\n{done.texts[-1]}")
            self._known[world, flags] = read(events)
        return self._known[world, flags]

    def compare(self, one: Combination) -> Result:
        """RuntimeError if a run fails."""
        begin = time.monotonic()
        stock = self.scalars(one.stock_world, one.stock)
        ours = self.scalars(one.world, one.ours)
        reference, lost = stock, {}
        if one.rounding:  # both are compared with the run without rounding
            exact = self.scalars(one.stock_world, one.model)
            reference = {tag: exact.get(tag, stock[tag]) for tag in stock}
            lost = distances(stock, reference)
        far = distances(ours, reference)
        if one.rounding:  # rounding errors of weights cancel in their norm, by chance
            del far["params-norm"]
        allowed = {tag: max(TOLERANCE, 2 * lost.get(tag, 0)) for tag in far}
        where = max(far, key=lambda tag: far[tag] / allowed[tag])
        return Result(one, far[where], where, allowed[where], time.monotonic() - begin)


def read(folder: Path) -> Scalars:
    """tag -> step -> value. What a step has twice, such as the validation that Megatron repeats
    when training is over, counts as it was first: the file is flushed before that."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    found: Scalars = {}
    for tag in events.Tags()["scalars"]:
        ours = tag.startswith("burst/")  # which stock has not
        if tag != "iteration-time" and not ours and not tag.endswith(" vs samples"):
            steps = found.setdefault(tag, {})
            for event in events.Scalars(tag):
                steps.setdefault(event.step, event.value)
    assert {"lm loss", "grad-norm", "lm loss validation"} <= found.keys(), sorted(found)
    return found


def distances(run: Scalars, reference: Scalars) -> dict[str, float]:
    """The largest relative difference over the steps, for each tag of the reference."""
    assert run.keys() == reference.keys(), run.keys() ^ reference.keys()
    far = {}
    for tag, steps in reference.items():
        assert run[tag].keys() == steps.keys(), tag
        far[tag] = max(_distance(run[tag][step], value) for step, value in steps.items())
    return far


def _distance(value: float, expected: float) -> float:
    if value == expected:
        return 0.0
    far = abs(value - expected) / abs(expected) if expected else float("inf")
    return far if far == far else float("inf")  # not a number is as wrong as can be


def main(words: list[str]) -> int:
    chosen = [c for c in COMBINATIONS if not words or any(word in c.name for word in words)]
    results, failed = [], []
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(Path(folder))
        bench = Bench(ranks, Path(folder))
        for number, one in enumerate(chosen, start=1):
            print(f"{number:2}/{len(chosen)} ", end="", flush=True)
            try:
                results.append(bench.compare(one))
                print(results[-1].line(), flush=True)
            except (RuntimeError, AssertionError) as error:
                failed.append(one.name)
                print(f"FAIL {one.name}: {str(error)[-3000:]}", flush=True)
        ranks.close()
    print(f"\n{'':5}{'combination':38} {'worst':>7} {'allowed':>10}  where")
    for result in sorted(results, key=lambda r: r.worst / r.allowed, reverse=True):
        print(result.line())
    missed = [result.combination.name for result in results if not result.good]
    summary = f"missed: {missed or 'none'}; failed: {failed or 'none'}"
    print(f"\n{len(chosen)} combinations; {summary}")
    return 1 if missed or failed or not chosen else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

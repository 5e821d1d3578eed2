"""What is done in which order, until the time is spent; what failed, what was left out.

A job is one cell of a table. No job starts after the budget, and the results are written down after
each, so that whatever ends the process early leaves what was measured. Decides the order. Knows
nothing of how a cell is measured or shown.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import attention, lm_head, ring, store, tuning
from .attention import Cell
from .cases import Case, cases
from .clock import Clock, forget
from .sizes import Sizes

ROOT = Path(__file__).resolve().parents[2]
Record = dict[str, Any]
Say = Callable[[str], None]


class Job(NamedTuple):
    name: str
    run: Callable[[], Record]


class Budget:
    """Seconds since the beginning, and how many are left."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic):
        self.total, self.now, self.begun = seconds, now, now()

    @property
    def spent(self) -> float:
        return self.now() - self.begun

    @property
    def left(self) -> float:
        return self.total - self.spent


def work(
    jobs: Sequence[Job], results: Record, budget: Budget, say: Say, save: Callable[[], None]
) -> None:
    """Do the jobs in turn and put their records into results["jobs"], by name; what was not begun
    into results["left out"]."""
    results["left out"] = [job.name for job in jobs]
    for job in jobs:
        if budget.left <= 0:
            break
        begun = budget.spent
        try:
            record = job.run()
        except Exception as error:  # the other jobs are done
            text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            record = {"kind": "broken", "failed": {"all": text[:300]}}
        record["took"] = budget.spent - begun
        results["jobs"][job.name] = record
        results["left out"].remove(job.name)
        say(f"[{budget.spent:4.0f} s] {job.name}{_faults(record)}")
        save()
        if record["failed"] and not _answers():
            say("the device no longer answers after a fault: nothing more can be measured")
            break
    save()


def _faults(record: Record) -> str:
    words = [f"; {who} FAILED: {text}" for who, text in record["failed"].items()]
    return "".join(words)


def _answers() -> bool:
    """Some faults (an illegal access, say) end all use of a device by this process."""
    if torch.cuda.is_available():
        try:
            forget(torch.device("cuda"))
            torch.cuda.synchronize()
        except RuntimeError:
            return False
    return True


def failures(results: Record) -> list[str]:
    """What went wrong, for the end of the output and the exit status."""
    return [
        f"{name}: {who}: {text}"
        for name, record in results["jobs"].items()
        for who, text in record["failed"].items()
    ]


def listed(args: Any, sizes: Sizes, clock: Clock, results: Record, budget: Budget) -> list[Job]:
    """The jobs that the arguments ask for and `results` lack, the most important first."""
    parts = {
        "tests": lambda: [Job("tests", lambda: tests(args, budget))],
        "attention": lambda: list(_attention(args, sizes, clock)),
        "ring": lambda: list(_rings(sizes, clock, results, budget)),
        "lm_head": lambda: [Job("LM head", lambda: lm_head.measure(sizes, clock))],
        "store": lambda: [Job("attention store", lambda: store.measure(sizes, clock))],
        "blocks": lambda: list(_blocks(sizes, clock)),
    }
    found = {part: parts[part]() if part in args.parts else [] for part in parts}
    # One size and one ratio of heads under every mask first, then one of everything else.
    first = len(_masks(args, sizes, sizes.tokens[0]))
    grid = found["attention"]
    order = [
        *found["tests"], *grid[:first], *found["lm_head"], *found["store"], *found["ring"],
        *grid[first:], *found["blocks"],
    ]  # fmt: skip
    return [job for job in order if job.name not in results["jobs"]]


def _attention(args: Any, sizes: Sizes, clock: Clock) -> Iterator[Job]:
    """Masks change fastest: every mask at the first size, then at the next."""
    cells = [
        Cell(case, heads, tokens)
        for tokens, heads in _by_importance(sizes)
        for case in _masks(args, sizes, tokens)
    ]
    for cell in cells:
        yield Job(cell.name, lambda cell=cell: attention.measure(cell, sizes, clock))


def _blocks(sizes: Sizes, clock: Clock) -> Iterator[Job]:
    """Each width both ways, over a causal pair: tiles of both kinds."""
    tokens = sizes.tokens[0]
    case = next(c for c in cases(tokens, sizes.window, sizes.block) if "own keys" in c.name)
    cell = Cell(case, sizes.heads[0], tokens)
    for width in tuning.WIDTHS:
        for direction in tuning.DIRECTIONS:
            yield Job(
                f"blocks, {direction}, width {width}",
                lambda direction=direction, width=width: tuning.measure(
                    direction, width, cell, sizes, clock
                ),
            )


def _masks(args: Any, sizes: Sizes, tokens: int) -> list[Case]:
    every = cases(tokens, sizes.window, sizes.block)
    wanted = args.masks or [""]
    found = [case for case in every if any(word in case.name for word in wanted)]
    if not found:
        raise ValueError(f"--masks {wanted}: there are {[case.name for case in every]}")
    return found


def _by_importance(sizes: Sizes) -> list[tuple[int, tuple[int, int]]]:
    """(tokens, heads): the first of each first, then what is next by both orders together."""
    every = [
        (i + j, i, tokens, heads)
        for i, tokens in enumerate(sizes.tokens)
        for j, heads in enumerate(sizes.heads)
    ]
    return [(tokens, heads) for _, _, tokens, heads in sorted(every, key=lambda x: x[:2])]


def _rings(sizes: Sizes, clock: Clock, results: Record, budget: Budget) -> Iterator[Job]:
    names = [f"ring of {nodes} x {per_node} ranks" for nodes, per_node in sizes.rings]

    def measured(index: int) -> Record:
        earlier = results["jobs"].get(names[index - 1]) if index else None
        if earlier is not None and earlier["kind"] != "ring":
            earlier = None
        grid = sizes.rings[index]
        tokens, fastest = ring.next_size(grid, earlier, sizes, budget.left)
        return ring.measure(grid, fastest or ring.kernels(clock.device), tokens, sizes, clock)

    for index, name in enumerate(names):
        yield Job(name, lambda index=index: measured(index))


def tests(args: Any, budget: Budget) -> Record:
    """The tests of the device, in a process of their own: pytest's closing line, what failed."""
    which = "gpu" if args.device == "cuda" else "not gpu"
    command = [sys.executable, "-m", "pytest", "-rfE", "--tb=short", "-m", which]
    # what other packages of this machine warn of is not what is tested
    command += ["-W", "default", *args.tests]
    seconds = min(args.tests_limit, max(1.0, budget.left))
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=seconds,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        failed = {"pytest": f"did not end within {seconds:.0f} s"}
        return {"kind": "tests", "summary": failed["pytest"], "failed": failed}
    lines = [line for line in done.stdout.splitlines() if line.strip()] or ["no output"]
    summary = lines[-1].strip("= ")
    failed = {
        line.split()[1]: line.partition(" - ")[2][:300]
        for line in lines
        if line.startswith(("FAILED ", "ERROR "))
    }
    if done.returncode and not failed:
        failed = {"pytest": f"status {done.returncode}: {(done.stderr or summary)[-300:]}"}
    if failed:
        sys.stdout.write(done.stdout[-4000:])
    return {"kind": "tests", "summary": summary, "failed": failed}


def load(path: Path) -> Record:
    return json.loads(path.read_text())


def save(results: Record, path: Path) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(json.dumps(results, indent=1) + "\n")
    fresh.replace(path)

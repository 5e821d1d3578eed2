"""How many cases of which kinds were tried, what failed, and how one command replays it."""

import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from workers import Workers

MOST = 3  # failures until the search ends
APART = 1_000_000  # cases of one seed


@dataclass
class Tally:
    """What one search found."""

    what: str
    tried: int = 0
    kinds: Counter = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, kinds: Iterable[str], faults: Iterable[str], case: object, number: object):
        self.tried += 1
        self.kinds.update(kinds)
        faults = list(faults)
        if faults:
            found = "\n  ".join(faults[:5])
            self.failures.append(
                f"case {number}:\n  {found}\n  {case}\n"
                f"  again: python -m tests.fuzz {self.what} --replay {number}"
            )

    @property
    def full(self) -> bool:
        """Have too many failed to go on?"""
        return len(self.failures) >= MOST

    def __str__(self):
        many = self.kinds.most_common()
        lines = [f"{self.what}: {self.tried} cases, {len(self.failures)} failures"]
        lines += [f"  {count:7d}  {kind}" for kind, count in sorted(many, key=lambda x: x[0])]
        return "\n".join([*lines, *self.failures])


def tried(
    what: str,
    cases: Iterable[int],
    case: Callable[[int], Any],
    kinds: Callable[[Any], list[str]],
    faults: Callable[[Any], list[str]],
) -> Tally:
    """Try the cases of these numbers, until too many have failed."""
    tally = Tally(what)
    for number in cases:
        one = case(number)
        tally.add(kinds(one), attempt(lambda one=one: faults(one)), one, number)
        if tally.full:
            break
    return tally


def attempt(check: Callable[[], list[str]]) -> list[str]:
    """The faults that `check` finds; an error that nobody expected is one."""
    try:
        return check()
    except Exception:
        return [traceback.format_exc()]


class Pools:
    """`pools(n)`: n processes of a backend, the same ones as long as they live and n stays."""

    def __init__(self, backend: str = "gloo"):
        self.backend, self.pool = backend, None

    def __call__(self, size: int) -> Workers:
        if self.pool is None or not self.pool.alive or self.pool.world != size:
            self.close()
            self.pool = Workers(size, backend=self.backend)
        return self.pool

    def close(self):
        if self.pool is not None:
            self.pool.close()


def numbers(seed: int, seconds: float, what: str) -> Iterator[int]:
    """Case after case of a seed until the time is over, with a bar on the terminal."""
    end, start = time.monotonic() + seconds, time.monotonic()
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=seconds)
        number = seed * APART
        while time.monotonic() < end:
            text = f"{what}: case {number}"
            progress.update(task, completed=time.monotonic() - start, description=text)
            yield number
            number += 1

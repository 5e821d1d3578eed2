"""Supervision of child processes: no item runs forever, and no fault affects other items.

A child runs items in turn and writes to the journal when each begins and ends. An item that exceeds
its limit, crashes, or makes the device unresponsive is lost; a new child runs the remaining items.
This module decides when a child is ended.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .journal import Journal

ROOT = Path(__file__).resolve().parents[2]
RESTART = 75  # exit status of a child that requests a new child for the remaining items
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PAUSE = 0.1  # seconds between two checks of a child
Record = dict[str, Any]


class Budget:
    """Seconds since the beginning, and the seconds that are left."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic):
        self.total, self.now, self.begun = seconds, now, now()

    @property
    def spent(self) -> float:
        return self.now() - self.begun

    @property
    def left(self) -> float:
        return self.total - self.spent

    def part(self, seconds: float) -> Budget:
        """Return a budget of `seconds`, at most the seconds that are left."""
        return Budget(min(self.left, seconds), self.now)


class Watch:
    """State of a child according to the journal: its open item and the duration of the item."""

    def __init__(self, journal: Journal, budget: Budget, on_end: Callable[[str, Record], None]):
        self.journal, self.budget, self.on_end = journal, budget, on_end
        self.read = len(journal.lines())
        self.size = -1
        self.open: str | None = None
        self.since, self.ended = budget.spent, 0

    def look(self) -> None:
        """Read new lines."""
        size = self.journal.size
        if size == self.size:
            return
        self.size, lines = size, self.journal.lines()
        for line in lines[self.read :]:
            if "begin" in line:
                self.open, self.since = line["begin"], self.budget.spent
            elif "end" in line:
                self.open, self.since, self.ended = None, self.budget.spent, self.ended + 1
                self.on_end(line["end"], line["record"])
        self.read = len(lines)

    @property
    def lasted(self) -> float:
        """Return seconds since the open item began, or else since the last end or the start."""
        return self.budget.spent - self.since


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """Turn a signal that would end this process into SystemExit.

    `follow` then ends its child, which would keep the device if it is stuck. Ignored signals stay
    ignored.
    """

    def end(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def follow(
    name: str,
    command: Sequence[str],
    journal: Journal,
    budget: Budget,
    limit: float,
    on_end: Callable[[str, Record], None],
    fine: Sequence[int] = (0,),
) -> None:
    """Run `command` repeatedly until one run ends with a status in `fine`, or the time is spent.

    Items that run when the time is spent have no end and are left out.

    Args:
        limit: Seconds for one item, and for the start of a child's first item.
        on_end: Called with name and record of each ended item.
    """
    log = journal.path.with_name("log.txt")
    outside = f"{name}, outside its items"
    if budget.left > 0 and outside in journal.ended():
        journal.drop(outside)  # from an earlier call; it is tried again
    while budget.left > 0:
        watch = Watch(journal, budget, on_end)
        with log.open("ab") as output:
            start = output.tell()
            child = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        try:
            status = _status(child, watch, limit)
        finally:
            child.kill()
            child.wait()
            journal.mend()
        if status in fine or budget.left <= 0:
            return
        if status == RESTART and watch.open is None:
            continue
        useless = watch.open is None and not watch.ended
        why = f"did not end within {limit:.0f} s" if status is None else _said(log, start, status)
        item = watch.open or outside
        journal.end(item, {"kind": "broken", "took": watch.lasted, "failed": {"all": why}})
        watch.look()
        if useless:
            return  # another child would fail in the same way


def _status(child: subprocess.Popen[bytes], watch: Watch, limit: float) -> int | None:
    """Return the exit status; None if the child exceeded a limit or the budget."""
    while True:
        status = child.poll()
        watch.look()
        if status is not None:
            return status
        if watch.lasted > limit or watch.budget.left <= 0:
            return None
        time.sleep(PAUSE)


def _said(log: Path, start: int, status: int) -> str:
    """Return the exit status and the last output line of a child, as text."""
    lines = log.read_bytes()[start:].decode(errors="replace").strip().splitlines() or ["no output"]
    return f"ended with status {status}: {lines[-1][:300]}"

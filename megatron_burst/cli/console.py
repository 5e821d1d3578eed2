# SPDX-License-Identifier: Apache-2.0
"""Terminal output of the commands, with rich."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer

from rich.console import Console

PATIENCE = 3.0  # seconds before `progress` writes a line to a log
WIDE = 10_000  # characters; wider than any table


def unwrapped(stderr: bool = False) -> Console:
    """Return a rich console that never wraps lines, for logs and for output that programs read."""
    return Console(stderr=stderr, width=WIDE, highlight=False)


def wrapped(stderr: bool = False) -> Console:
    """Return a rich console that wraps lines in a terminal but not in a log."""
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else unwrapped(stderr)


@contextmanager
def progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """Show the progress of long work on standard error.

    A terminal shows a bar that disappears at the end. A log gets one line if the work takes longer
    than `PATIENCE` seconds.

    Args:
        title: Description of the work.

    Yields:
        Function `update(done, total)` that sets the bar. Until its first call, the bar shows no
        fraction.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        timer = Timer(PATIENCE, lambda: print(f"{title} ...", file=sys.stderr, flush=True))
        timer.daemon = True
        timer.start()
        try:
            yield lambda done, total: None
        finally:
            timer.cancel()
        return
    from rich import progress as bars

    columns = (
        bars.TextColumn(title),
        bars.BarColumn(),
        bars.TaskProgressColumn(),
        bars.TimeElapsedColumn(),
    )
    with bars.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)

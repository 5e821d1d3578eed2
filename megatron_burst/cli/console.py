# SPDX-License-Identifier: Apache-2.0
"""The terminal, as the commands write to it with rich."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer

from rich.console import Console

PATIENCE = 3.0  # seconds of silence where there is no terminal
WIDE = 10_000  # characters; wider than any table


def unwrapped(stderr: bool = False) -> Console:
    """A console that keeps every row of a table on one line, for logs and other programs."""
    return Console(stderr=stderr, width=WIDE, highlight=False)


def wrapped(stderr: bool = False) -> Console:
    """A console that wraps at the width of the terminal, and in a log keeps lines whole."""
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else unwrapped(stderr)


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Long work, on standard error: on a terminal a bar, gone when the work ends; otherwise one
    line, if it takes longer than `PATIENCE` seconds.

    Yields a function to be called with (done, total), or never: then the bar has no end.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        said = Timer(PATIENCE, lambda: print(f"{what} ...", file=sys.stderr, flush=True))
        said.daemon = True
        said.start()
        try:
            yield lambda done, total: None
        finally:
            said.cancel()
        return
    from rich import progress as bars

    columns = (
        bars.TextColumn(what),
        bars.BarColumn(),
        bars.TaskProgressColumn(),
        bars.TimeElapsedColumn(),
    )
    with bars.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)

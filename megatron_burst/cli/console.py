"""The terminal, as the commands write to it with rich."""

from __future__ import annotations

from rich.console import Console

WIDE = 10_000  # characters; wider than any table


def unwrapped(stderr: bool = False) -> Console:
    """A console that keeps every row of a table on one line, for logs and other programs."""
    return Console(stderr=stderr, width=WIDE, highlight=False)


def wrapped(stderr: bool = False) -> Console:
    """A console that wraps at the width of the terminal, and in a log keeps lines whole."""
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else unwrapped(stderr)

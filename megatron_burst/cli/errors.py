"""Errors of a program that a command runs: which are for its user, in a line.

Owns the rule: what this package raised about flags or settings becomes the ``ValueError`` that the
command line shows as one line, on every rank that has it; anything else is shown with its traceback
and ends with exit code 1. Knows nothing of the programs.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

PACKAGE = Path(__file__).parents[1]


@contextmanager
def plainly() -> Iterator[None]:
    """Around what runs somebody else's program."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if _raised_here(error.__traceback__):
            raise ValueError(str(error)) from error
        traceback.print_exc()
        raise SystemExit(1) from error


def _raised_here(frames: TracebackType | None) -> bool:
    """Was an error raised by this package, not by what it called or by the program?"""
    last = [frame for frame, _ in traceback.walk_tb(frames)][-1]
    return PACKAGE in Path(last.f_code.co_filename).parents

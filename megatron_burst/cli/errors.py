"""Which errors of a program that a command runs are its user's to mend.

An error that this package raised is about flags or settings: it becomes the `ValueError` that the
command line prints as one line. Any other error keeps its traceback, and the exit status is 1.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

PACKAGE = Path(__file__).parents[1]


@contextmanager
def user_errors() -> Iterator[None]:
    """A context in which to run a program that is not this package's.

    Raises ValueError for an error that this package raised, and SystemExit(1) after printing the
    traceback of any other ValueError or RuntimeError.
    """
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if _raised_here(error.__traceback__):
            raise ValueError(str(error)) from error
        traceback.print_exc()
        raise SystemExit(1) from error


def _raised_here(frames: TracebackType | None) -> bool:
    """Whether this package raised the error itself, not a library it called or the program."""
    last = [frame for frame, _ in traceback.walk_tb(frames)][-1]
    return PACKAGE in Path(last.f_code.co_filename).parents

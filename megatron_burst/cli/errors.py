# SPDX-License-Identifier: Apache-2.0
"""Which errors of a program that a command runs are its user's to mend.

An error that this package raised is about flags or settings: it becomes the `ValueError` that the
command line prints as one line. Any other error keeps its traceback, and the exit status is 1.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def ours(error: BaseException) -> bool:
    """Whether this package raised it: not a library, nor the program."""
    last = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
    return PACKAGE in Path(last.f_code.co_filename).parents


@contextmanager
def user_errors() -> Iterator[None]:
    """A context in which to run a program that is not this package's.

    Raises ValueError for an error that this package raised, and SystemExit(1) after printing the
    traceback of any other ValueError or RuntimeError.
    """
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if ours(error):
            raise ValueError(str(error)) from error
        traceback.print_exc()
        raise SystemExit(1) from error

# SPDX-License-Identifier: Apache-2.0
"""User errors, as opposed to errors of the script or recipe that a command runs.

Errors that this package raises are about flags or settings. They become a `ValueError`, which the
command line prints as one line. For any other error, the traceback is printed, with exit status 1.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def raised_here(error: BaseException) -> bool:
    """Return True if code of this package raised the error, False for any other code."""
    last = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
    return PACKAGE in Path(last.f_code.co_filename).parents


@contextmanager
def user_errors() -> Iterator[None]:
    """Return a context manager that converts the errors of a script that runs in its block.

    Raises:
        ValueError: This package raised an error.
        SystemExit: Other code raised a ValueError or RuntimeError. Its traceback is printed; the
            exit status is 1.
    """
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if raised_here(error):
            raise ValueError(str(error)) from error
        traceback.print_exc()
        raise SystemExit(1) from error

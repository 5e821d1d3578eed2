"""Our own lines in the log of a training script, whatever level it shows of others'.

Owns: the handler they go through. Must not know: what is said.
"""

from __future__ import annotations

import logging
import os

from megatron_burst.megatron.patching.registry import PatchSet

_NAME = "megatron_burst"


class _Handler(logging.Handler):
    """To whatever is standard output when a line is said."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), flush=True)


def log(line: str) -> None:
    """Say it, once per job."""
    if int(os.environ.get("RANK", 0)) == 0:
        logging.getLogger(_NAME).info(line)


def speak(patches: PatchSet | None = None) -> None:
    """Show our lines on standard output, until ``patches`` are removed if given. Idempotent."""
    logger = logging.getLogger(_NAME)
    if any(isinstance(handler, _Handler) for handler in logger.handlers):
        return
    handler = _Handler()
    handler.setFormatter(logging.Formatter("> megatron_burst: %(message)s"))
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False

    def restore() -> None:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]

    if patches is not None:
        patches.on_undo(restore)

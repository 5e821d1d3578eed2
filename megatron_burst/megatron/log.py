"""Log lines of this package in a training script, independent of the script's own log level."""

from __future__ import annotations

import logging
import os

from megatron_burst.megatron.patching.registry import PatchSet

_NAME = "megatron_burst"


class _Handler(logging.Handler):
    """Writes to the standard output of the moment, which tests and launchers may replace."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), flush=True)


def log(line: str) -> None:
    """Log a line, on rank 0 only."""
    if int(os.environ.get("RANK", 0)) == 0:
        logging.getLogger(_NAME).info(line)


def show_log(patches: PatchSet | None = None) -> None:
    """Show this package's log on standard output, until ``patches`` (if given) are removed.

    Idempotent.
    """
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

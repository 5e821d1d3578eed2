"""Progress of a training run: a live table on a terminal, plain lines in other output.

`Reporter` prints and writes the metrics file on global rank 0. On other ranks it prints nothing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, TextIO

from rich.live import Live
from rich.table import Table

_COLUMNS = ("step", "loss", "grad norm", "lr", "tokens/s")
_ROWS = 12


class Reporter:
    """Context manager that prints and records one line per step."""

    def __init__(self, active: bool, metrics: str | None, log_interval: int, last_step: int):
        self._active, self._interval, self._last = active, max(1, log_interval), last_step
        self.history: list[dict[str, float]] = []
        self._rows: list[tuple[str, ...]] = []
        self._file: TextIO | None = None
        self._live: Live | None = None
        if active and metrics:
            Path(metrics).parent.mkdir(parents=True, exist_ok=True)
            self._file = Path(metrics).open("w")  # noqa: SIM115  closed by __exit__

    def __enter__(self) -> Reporter:
        if self._active and sys.stdout.isatty():
            self._live = Live(refresh_per_second=4)
            self._live.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._live is not None:
            self._live.__exit__(*exc)
        if self._file is not None:
            self._file.close()

    def run(self, settings: dict[str, Any], startup: str) -> None:
        """Record the settings, and print the start-up line."""
        self._write({"run": settings | {"startup": startup}})
        if self._active:
            (self._live.console.print if self._live else print)(startup)

    def step(self, step: int, loss: float, grad_norm: float, lr: float, tokens_per_s: float):
        """Report one optimizer step; loss in nats per token."""
        record = {"step": step, "loss": loss, "grad_norm": grad_norm, "lr": lr}
        record["tokens_per_s"] = tokens_per_s
        self.history.append(record)
        self._write(record)
        if not self._active or (step % self._interval and step != self._last):
            return
        row = (
            f"{step}/{self._last}",
            f"{loss:.4f}",
            f"{grad_norm:.3f}",
            f"{lr:.2e}",
            f"{tokens_per_s:,.0f}",
        )
        self._rows = [*self._rows, row][-_ROWS:]
        if self._live is None:
            cells = zip(_COLUMNS, row, strict=True)
            print("  ".join(f"{name} {value}" for name, value in cells), flush=True)
        else:
            self._live.update(self._table())

    def _table(self) -> Table:
        table = Table(*_COLUMNS, title="training")
        for column in table.columns:
            column.justify = "right"
        for row in self._rows:
            table.add_row(*row)
        return table

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()

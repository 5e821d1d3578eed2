"""How findings are printed: as rows, each as soon as it is known, or all of them as JSON."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from ..console import wrapped
from .finding import LEVELS, Finding

STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}
TOPIC = 22  # characters; a longer topic pushes its row to the right


class Report:
    """Takes findings section by section and prints them; `findings` holds all so far."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.console = wrapped(stderr=as_json)  # stdout is the JSON's alone
        self.findings: list[Finding] = []

    def add(self, section: Iterable[Finding], doing: str = "") -> None:
        """Print findings; a terminal shows `doing` while the next one is computed."""
        with self.console.status(doing) if doing else contextlib.nullcontext() as status:
            for one in section:
                self.findings.append(one)
                if status is not None:
                    status.update(f"{doing}: {one.topic} done")
                if not self.as_json:
                    self.console.print(_row(one))

    def end(self, facts: dict[str, Any]) -> None:
        """Print the number of problems and notes; as JSON all findings and the facts."""
        counts = {level: sum(one.level == level for one in self.findings) for level in LEVELS}
        if self.as_json:
            found = [one._asdict() for one in self.findings]
            print(json.dumps({"findings": found, "counts": counts} | facts, indent=1))
            return
        problems, notes = counts["problem"], counts["note"]
        text = f"{problems} problem{'s' * (problems != 1)}, {notes} note{'s' * (notes != 1)}"
        self.console.print(text)


def show(findings: Sequence[Finding], facts: dict[str, Any], as_json: bool) -> None:
    """Print findings that are all known, and with `as_json` the facts behind them."""
    report = Report(as_json)
    report.add(findings)
    report.end(facts)


def _row(one: Finding) -> Table:
    """The level, the topic and what was found, and in a second line what to do about it."""
    row = Table.grid(padding=(0, 2))
    row.add_column(min_width=len("problem"))
    row.add_column(min_width=TOPIC, no_wrap=True)
    row.add_column(overflow="fold")
    row.add_row(Text(one.level, style=STYLES[one.level]), Text(one.topic), Text(one.what))
    if one.fix:
        row.add_row("", "", Text(f"-> {one.fix}", style="bold"))
    return row

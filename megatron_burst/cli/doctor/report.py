# SPDX-License-Identifier: Apache-2.0
"""Findings of the doctor, their levels, the exit status, and their output.

Findings are printed as rows as soon as they are computed, or all together as JSON. Optional
packages that are absent share one row at the end; JSON has a finding for each.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from ..console import progress, wrapped

LEVELS = ("ok", "note", "problem", "absent")
STYLES = {"ok": "green", "note": "yellow", "problem": "bold red", "absent": "dim"}
TOPIC = 22  # characters; a longer topic pushes its row to the right


class Finding(NamedTuple):
    """A result of a check.

    Attributes:
        level: "ok", "note", "problem", or "absent" for an optional package that is not installed.
        topic: Subject of the check.
        what: Result of the check.
        fix: Suggested change, or empty.
    """

    level: str
    topic: str
    what: str
    fix: str = ""


def ok(topic: str, what: str) -> Finding:
    """Return a finding without a problem."""
    return Finding("ok", topic, what)


def note(topic: str, what: str, fix: str = "") -> Finding:
    """Return a finding that may need attention."""
    return Finding("note", topic, what, fix)


def problem(topic: str, what: str, fix: str) -> Finding:
    """Return a finding that must be fixed."""
    return Finding("problem", topic, what, fix)


def absent(topic: str, what: str) -> Finding:
    """Return a finding for an optional package that is not installed."""
    return Finding("absent", topic, what)


def status(findings: Iterable[Finding]) -> int:
    """Return the exit status for scripts: 1 if there is a problem, otherwise 0."""
    return int(any(finding.level == "problem" for finding in findings))


class Report:
    """Printer of findings. The attribute `findings` contains all findings that `add` received."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.console = wrapped(stderr=as_json)  # stdout is only for JSON
        self.findings: list[Finding] = []

    def add(self, section: Iterable[Finding], doing: str = "") -> None:
        """Print findings as they are computed.

        Args:
            section: Findings.
            doing: Text that a terminal shows while the next finding is computed. A log shows the
                text once.
        """
        if doing and self.console.is_terminal:
            with self.console.status(doing) as status:
                for finding in section:
                    self._take(finding)
                    status.update(f"{doing}: {finding.topic} done")
            return
        with progress(doing) if doing else contextlib.nullcontext():
            for finding in section:
                self._take(finding)

    def _take(self, finding: Finding) -> None:
        self.findings.append(finding)
        if not self.as_json and finding.level != "absent":
            self.console.print(_row(finding))

    def end(self, facts: dict[str, Any]) -> None:
        """Print absent packages and the number of problems and notes, or everything as JSON.

        Args:
            facts: Further entries of the JSON output.
        """
        counts = {
            level: sum(finding.level == level for finding in self.findings) for level in LEVELS
        }
        if self.as_json:
            listed = [finding._asdict() for finding in self.findings]
            print(json.dumps({"findings": listed, "counts": counts} | facts, indent=1))
            return
        if counts["absent"]:
            topics = ", ".join(
                finding.topic for finding in self.findings if finding.level == "absent"
            )
            self.console.print(_row(absent("optional", f"not installed, not needed: {topics}")))
        problems, notes = counts["problem"], counts["note"]
        self.console.print(f"{_counted(problems, 'problem')}, {_counted(notes, 'note')}")


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _row(finding: Finding) -> Table:
    """Return a table of one row with level, topic and result; a second row has the fix."""
    row = Table.grid(padding=(0, 2))
    row.add_column(min_width=len("problem"))
    row.add_column(min_width=TOPIC, no_wrap=True)
    row.add_column(overflow="fold")
    row.add_row(
        Text(finding.level, style=STYLES[finding.level]), Text(finding.topic), Text(finding.what)
    )
    if finding.fix:
        row.add_row("", "", Text(f"-> {finding.fix}", style="bold"))
    return row

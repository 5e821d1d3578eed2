# SPDX-License-Identifier: Apache-2.0
"""Findings of the doctor, their levels, the exit status that follows from them, and how they are
printed: as rows, each as soon as it is known, or all of them as JSON. What is absent and not needed
takes one row at the end; JSON has the reasons.
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
    """level: "ok", "note", "problem", or "absent": what nobody has to install; fix: what to do,
    empty if there is nothing to do.
    """

    level: str
    topic: str
    what: str
    fix: str = ""


def ok(topic: str, what: str) -> Finding:
    return Finding("ok", topic, what)


def note(topic: str, what: str, fix: str = "") -> Finding:
    return Finding("note", topic, what, fix)


def problem(topic: str, what: str, fix: str) -> Finding:
    return Finding("problem", topic, what, fix)


def absent(topic: str, what: str) -> Finding:
    return Finding("absent", topic, what)


def status(findings: Iterable[Finding]) -> int:
    """The exit status for scripts: 1 if there is a problem, else 0."""
    return int(any(one.level == "problem" for one in findings))


class Report:
    """Takes findings section by section and prints them; `findings` holds all so far."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.console = wrapped(stderr=as_json)  # stdout is the JSON's alone
        self.findings: list[Finding] = []

    def add(self, section: Iterable[Finding], doing: str = "") -> None:
        """Print findings; a terminal shows `doing` while the next one is computed, a log once."""
        if doing and self.console.is_terminal:
            with self.console.status(doing) as status:
                for one in section:
                    self._take(one)
                    status.update(f"{doing}: {one.topic} done")
            return
        with progress(doing) if doing else contextlib.nullcontext():
            for one in section:
                self._take(one)

    def _take(self, one: Finding) -> None:
        self.findings.append(one)
        if not self.as_json and one.level != "absent":
            self.console.print(_row(one))

    def end(self, facts: dict[str, Any]) -> None:
        """Print what is absent and the number of problems and notes; as JSON all findings and the
        facts.
        """
        counts = {level: sum(one.level == level for one in self.findings) for level in LEVELS}
        if self.as_json:
            listed = [one._asdict() for one in self.findings]
            print(json.dumps({"findings": listed, "counts": counts} | facts, indent=1))
            return
        if counts["absent"]:
            topics = ", ".join(one.topic for one in self.findings if one.level == "absent")
            self.console.print(_row(absent("optional", f"not installed, not needed: {topics}")))
        problems, notes = counts["problem"], counts["note"]
        self.console.print(f"{_counted(problems, 'problem')}, {_counted(notes, 'note')}")


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _row(one: Finding) -> Table:
    """The level, the topic and the finding, and in a second line what to do about it."""
    row = Table.grid(padding=(0, 2))
    row.add_column(min_width=len("problem"))
    row.add_column(min_width=TOPIC, no_wrap=True)
    row.add_column(overflow="fold")
    row.add_row(Text(one.level, style=STYLES[one.level]), Text(one.topic), Text(one.what))
    if one.fix:
        row.add_row("", "", Text(f"-> {one.fix}", style="bold"))
    return row

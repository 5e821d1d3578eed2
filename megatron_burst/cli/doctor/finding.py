"""A finding of the doctor, its three levels, and the exit status that follows from them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

LEVELS = ("ok", "note", "problem")


class Finding(NamedTuple):
    """level: "ok", "note" or "problem"; fix: what to do, empty if there is nothing to do."""

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


def status(findings: Iterable[Finding]) -> int:
    """The exit status for scripts: 1 if there is a problem, else 0."""
    return int(any(one.level == "problem" for one in findings))

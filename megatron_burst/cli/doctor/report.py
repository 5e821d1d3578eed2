"""How findings are shown: a table where somebody reads, JSON where a script does.

Owns the looks. Findings are shown section by section, as soon as they are known. rich is a
convenience: without it, or where the output is no terminal, lines, each as soon as it is known.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from .finding import LEVELS, Finding

MARKS = {"ok": "green", "note": "yellow", "problem": "bold red"}


class Report:
    """Takes findings section by section and prints them; `findings` has all so far."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.findings: list[Finding] = []

    def add(self, section: Iterable[Finding], doing: str = "") -> None:
        """Print findings; ``doing`` says on stderr what takes its time, where somebody reads."""
        table = not self.as_json and sys.stdout.isatty() and _has_rich()
        found: list[Finding] = []
        with _progress(doing) as said:
            for one in section:
                found.append(one)
                said(f"{doing}: {one.topic} done")
                if not table and not self.as_json:
                    _line(one)
        if table:
            _table(found)
        self.findings += found

    def end(self, facts: dict[str, Any]) -> None:
        """Print how many of each level there are; as JSON everything, with the facts behind it."""
        counts = {level: sum(one.level == level for one in self.findings) for level in LEVELS}
        if self.as_json:
            found = [one._asdict() for one in self.findings]
            print(json.dumps({"findings": found, "counts": counts} | facts, indent=1))
            return
        problems, notes = counts["problem"], counts["note"]
        print(f"{problems} problem{'s' * (problems != 1)}, {notes} note{'s' * (notes != 1)}")


def show(findings: Sequence[Finding], facts: dict[str, Any], as_json: bool) -> None:
    """Print findings that are all known, and with `as_json` the facts behind them."""
    shown = Report(as_json)
    shown.add(findings)
    shown.end(facts)


def _has_rich() -> bool:
    try:
        import rich.console
        import rich.table  # noqa: F401
    except ImportError:
        return False
    return True


@contextlib.contextmanager
def _progress(doing: str) -> Iterator[Callable[[str], object]]:
    """A moving line on stderr, or a still one where rich is not there; no line in a log."""
    if not doing or not sys.stderr.isatty():
        yield lambda text: None
    elif not _has_rich():
        print(f"{doing} ...", file=sys.stderr, flush=True)
        yield lambda text: None
    else:
        from rich.console import Console

        with Console(stderr=True).status(doing) as moving:
            yield moving.update


def _table(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for heading in ("", "what", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    for one in findings:
        mark = Text(one.level, style=MARKS[one.level])
        table.add_row(mark, Text(one.topic), Text(one.what), Text(one.fix))
    Console().print(table)


def _line(one: Finding) -> None:
    print(f"{one.level:8}{one.topic:22}  {one.what}", flush=True)
    if one.fix:
        print(f"{'':32}-> {one.fix}", flush=True)

"""How findings are shown: a table where somebody reads, JSON where a script does.

Owns the looks. rich is a convenience: without it, or where the output is no terminal, lines.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from .finding import LEVELS, Finding

MARKS = {"ok": "green", "note": "yellow", "problem": "bold red"}


def show(findings: Sequence[Finding], facts: dict[str, Any], as_json: bool) -> None:
    """Print findings, and with `as_json` the facts behind them."""
    counts = {level: sum(one.level == level for one in findings) for level in LEVELS}
    if as_json:
        found = [one._asdict() for one in findings]
        print(json.dumps({"findings": found, "counts": counts} | facts, indent=1))
        return
    if not (sys.stdout.isatty() and _table(findings)):
        _lines(findings)
    problems, notes = counts["problem"], counts["note"]
    print(f"{problems} problem{'s' * (problems != 1)}, {notes} note{'s' * (notes != 1)}")


def _table(findings: Sequence[Finding]) -> bool:
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    table = Table(box=None, pad_edge=False)
    for heading in ("", "what", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    for one in findings:
        mark = Text(one.level, style=MARKS[one.level])
        table.add_row(mark, Text(one.topic), Text(one.what), Text(one.fix))
    Console().print(table)
    return True


def _lines(findings: Sequence[Finding]) -> None:
    width = max((len(one.topic) for one in findings), default=0)
    for one in findings:
        print(f"{one.level:8}{one.topic:{width}}  {one.what}")
        if one.fix:
            print(f"{'':8}{'':{width}}  -> {one.fix}")

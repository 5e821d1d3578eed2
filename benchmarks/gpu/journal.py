"""The file of a run: JSON lines, each on disk as soon as it is known, so that no kill loses it.

Lines: a head (machine, versions), the commands, the items of each stage, and of each item that it
began, how it ended, or that its end is dropped. An item is a test or a cell of a table. Runs and
children append to the same file, one at a time; results are what its lines say. Decides what
survives: whole lines do, and a torn last one never was.
"""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Journal:
    """Appends lines to a file, and reads them all again."""

    def __init__(self, path: Path):
        self.path = path

    def write(self, **line: Any) -> None:
        """Append one line; it is with the operating system when this returns."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")

    def begin(self, name: str) -> None:
        self.write(begin=name)

    def end(self, name: str, record: Record) -> None:
        """record: "kind", "failed" ({who: what}), and what the kind has besides."""
        self.write(end=name, record=record)

    def drop(self, name: str) -> None:
        """Forget how an item ended: it is tried again."""
        self.write(drop=name)

    def mend(self) -> None:
        """Cut off a last line that a killed writer left unfinished; nobody may be writing."""
        if self.path.exists():
            whole = self.path.read_bytes()
            if not whole.endswith(b"\n"):
                self.path.write_bytes(whole[: whole.rfind(b"\n") + 1])

    @property
    def size(self) -> int:
        """Bytes."""
        return self.path.stat().st_size if self.path.exists() else 0

    def lines(self) -> list[Record]:
        """Every whole line."""
        if not self.path.exists():
            return []
        text = self.path.read_bytes()
        return [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]

    def ended(self) -> set[str]:
        """The names of the items that need not be done any more."""
        return set(self.results()["jobs"])

    def results(self) -> Record:
        """The head, "commands", the records of all items in "jobs" by name in the order in which
        they ended, and in "left out" the others, of each stage: its items, or itself if nobody
        has listed them yet."""
        results: Record = {"commands": [], "jobs": {}}
        stages: dict[str, list[str] | None] = {}
        for line in self.lines():
            results |= line.get("head", {})
            results["commands"] += [line["command"]] if "command" in line else []
            if "stage" in line:
                known, more = stages.get(line["stage"]), line["items"]
                stages[line["stage"]] = known if more is None else [*(known or ()), *more]
            if "end" in line:
                results["jobs"][line["end"]] = line["record"]
            if "drop" in line:
                results["jobs"].pop(line["drop"], None)
        every = [[stage] if items is None else items for stage, items in stages.items()]
        names, done = dict.fromkeys(chain.from_iterable(every)), results["jobs"]
        results["left out"] = [name for name in names if name not in done]
        return results

"""File of a run: JSON lines, each written to disk at once, so that a kill loses none.

Lines are a head (machine, versions), the commands, the items of each stage, and the begin, the end
or the dropped end of each item. An item is a test or a cell of a table. Runs and children append to
the same file, one at a time. Only complete lines count; an incomplete last line is ignored.
"""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Journal:
    """Writer and reader of a file of JSON lines."""

    def __init__(self, path: Path):
        self.path = path

    def write(self, **line: Any) -> None:
        """Append one line; the operating system has it when this returns."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")

    def begin(self, name: str) -> None:
        self.write(begin=name)

    def end(self, name: str, record: Record) -> None:
        """Record the end of an item: "kind", "failed" ({name: error}), and fields of the kind."""
        self.write(end=name, record=record)

    def drop(self, name: str) -> None:
        """Forget how an item ended, so that it is tried again."""
        self.write(drop=name)

    def mend(self) -> None:
        """Remove the incomplete last line of a killed writer; no other process may write."""
        if self.path.exists():
            whole = self.path.read_bytes()
            if not whole.endswith(b"\n"):
                self.path.write_bytes(whole[: whole.rfind(b"\n") + 1])

    @property
    def size(self) -> int:
        """Return the size of the file in bytes."""
        return self.path.stat().st_size if self.path.exists() else 0

    def lines(self) -> list[Record]:
        """Return every complete line."""
        if not self.path.exists():
            return []
        text = self.path.read_bytes()
        return [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]

    def ended(self) -> set[str]:
        """Return the names of the items that have ended."""
        return set(self.results()["jobs"])

    def results(self) -> Record:
        """Return the head, "commands", "jobs" and "left out".

        "jobs" has the records of all ended items by name, in the order of their ends. "left out"
        has the other items of each stage, or the stage itself if its items are not listed yet.
        """
        results: Record = {"commands": [], "jobs": {}}
        stages: dict[str, list[str] | None] = {}
        for line in self.lines():
            results |= line.get("head", {})
            results["commands"] += [line["command"]] if "command" in line else []
            if "stage" in line:
                earlier, more = stages.get(line["stage"]), line["items"]
                stages[line["stage"]] = earlier if more is None else [*(earlier or ()), *more]
            if "end" in line:
                results["jobs"][line["end"]] = line["record"]
            if "drop" in line:
                results["jobs"].pop(line["drop"], None)
        every = [[stage] if items is None else items for stage, items in stages.items()]
        names, done = dict.fromkeys(chain.from_iterable(every)), results["jobs"]
        results["left out"] = [name for name in names if name not in done]
        return results

"""Traces on disk: events as JSON, which can be read again, and Chrome's trace format."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .record import STREAMS, Event


@dataclass(frozen=True)
class Trace:
    """The events of all ranks on one clock. marks: (name, begin, end) of each pass, in seconds."""

    title: str
    events: tuple[Event, ...]
    marks: tuple[tuple[str, float, float], ...] = ()

    @property
    def ranks(self) -> list[int]:
        return sorted({event.rank for event in self.events})

    @property
    def begin(self) -> float:
        return min(event.begin for event in self.events)

    @property
    def end(self) -> float:
        return max(event.end for event in self.events)

    def busy(self, rank: int, stream: str) -> float:
        """Seconds in which a stream of a rank was busy; overlapping events count once."""
        total, until = 0.0, -1.0
        mine = [e for e in self.events if (e.rank, e.stream) == (rank, stream)]
        for event in sorted(mine, key=lambda event: event.begin):
            begin = max(event.begin, until)
            total += max(0.0, event.end - begin)
            until = max(until, event.end)
        return total


def save(trace: Trace, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"title": trace.title, "marks": trace.marks, "events": trace.events}
    path.write_text(json.dumps(record))


def load(path: Path) -> Trace:
    """The trace that `save` wrote. Raises ValueError if the file holds none."""
    try:
        record = json.loads(path.read_text())
        events = tuple(Event(*event) for event in record["events"])
        marks = tuple((name, begin, end) for name, begin, end in record["marks"])
        return Trace(record["title"], events, marks)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no trace of megatron-burst: {error}") from error


def save_chrome(trace: Trace, path: Path) -> None:
    """Write Chrome's format: a process per rank, a thread per stream, times in microseconds."""
    entries: list[dict[str, Any]] = []
    for rank in trace.ranks:
        entries.append(_name("process_name", rank, 0, f"rank {rank}"))
        entries += [_name("thread_name", rank, i, stream) for i, stream in enumerate(STREAMS)]
    for event in trace.events:
        entries.append(
            {
                "name": event.name, "cat": event.stream, "ph": "X", "pid": event.rank,
                "tid": STREAMS.index(event.stream), "ts": 1e6 * (event.begin - trace.begin),
                "dur": 1e6 * (event.end - event.begin),
            }
        )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"traceEvents": entries, "displayTimeUnit": "ms", "otherData": {"title": trace.title}}
    path.write_text(json.dumps(record))


def _name(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}

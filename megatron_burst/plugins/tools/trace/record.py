# SPDX-License-Identifier: Apache-2.0
"""What torch's profiler saw of attention, as events of three streams per rank.

The loop of `execution` marks every pair of chunks and every wait with `record_function`, so any
profile of a run with the plugin can be read here, whether this command made it or a training run
did. Streams: compute (the local attention of a pair, with its merge), transfer (a message, from its
posting until the rank has seen its end) and wait (the rank only waits). On a GPU, compute and
transfer are those of the device, and wait is the gap between two pairs of one pass, because the
host runs ahead there.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

STREAMS = ("compute", "transfer", "wait")
PASS = "trace: "  # begins the name of a range that is a whole pass
# What a range of the profiler shows, by its name.
NAMES = {
    "compute": re.compile(r".*: queries of rank \d+, keys of rank \d+$"),
    "wait": re.compile(r".*: wait, boundary \d+$"),
    "transfer": re.compile(r"gloo:(send|recv)$|nccl(Dev)?Kernel"),
    "pass": re.compile(re.escape(PASS)),
}


class TraceEvent(NamedTuple):
    """One event. begin, end: seconds of a clock that all processes of a host share."""

    rank: int
    stream: str
    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Trace:
    """The events of all ranks on one clock. marks: (name, begin, end) of each pass, in seconds."""

    title: str
    events: tuple[TraceEvent, ...]
    marks: tuple[tuple[str, float, float], ...] = ()

    @classmethod
    def of_ranks(cls, title: str, events: Iterable[TraceEvent]) -> Trace:
        """A trace of events that may contain passes, of which each becomes one mark: from the
        first rank's begin to the last rank's end.
        """
        events = tuple(events)
        passes: dict[str, list[TraceEvent]] = {}
        for event in events:
            if event.stream == "pass":
                passes.setdefault(event.name, []).append(event)
        marks = tuple(
            (name, min(e.begin for e in spans), max(e.end for e in spans))
            for name, spans in passes.items()
        )
        return cls(title, tuple(event for event in events if event.stream in STREAMS), marks)

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
        total, until = 0.0, float("-inf")
        events = [e for e in self.events if (e.rank, e.stream) == (rank, stream)]
        for event in sorted(events, key=lambda event: event.begin):
            begin = max(event.begin, until)
            total += max(0.0, event.end - begin)
            until = max(until, event.end)
        return total


def load(paths: Sequence[Path]) -> Trace:
    """The trace in Chrome files: one that `save` wrote, or one of torch's profiler per rank.

    Raises ValueError for a file without events of attention.
    """
    events: list[TraceEvent] = []
    title = ", ".join(path.stem for path in paths)
    for path in paths:
        try:
            record = json.loads(_text_of(path))
            title = record.get("otherData", {}).get("title", title)
            events += (profile := list(events_of(record)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} holds no trace of megatron-burst: {error}") from error
        if not profile:
            raise ValueError(f"{path} holds no trace of megatron-burst: no attention ran in it")
    return Trace.of_ranks(title, events)


def _text_of(path: Path) -> str:
    """Megatron-LM's profiler writes its traces compressed."""
    return gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()


def events_of(record: dict[str, Any]) -> Iterator[TraceEvent]:
    """The events of attention in a Chrome trace of torch's profiler, or in one that `save` wrote,
    where the process is the rank.
    """
    rank = record.get("distributedInfo", {"rank": None})["rank"]
    on_gpu = any(entry.get("cat") == "gpu_user_annotation" for entry in record["traceEvents"])
    compute = []
    for entry in record["traceEvents"]:
        if entry.get("ph") != "X" or not (stream := _stream(entry, on_gpu)):
            continue
        name = entry["name"].removeprefix(PASS)
        begin = entry["ts"] / 1e6
        at = entry["pid"] if rank is None else rank
        event = TraceEvent(at, stream, name, begin, begin + entry["dur"] / 1e6)
        if stream == "compute":
            compute.append(event)
        yield event
    if on_gpu:
        yield from _gaps(compute)


def _stream(entry: dict[str, Any], on_gpu: bool) -> str | None:
    """The stream of an entry; None where it shows nothing of attention, or only that the host
    handed work to the device.
    """
    category, name = entry.get("cat"), entry["name"]
    if category in (*STREAMS, "pass"):
        return category
    stream = next((each for each, form in NAMES.items() if form.match(name)), None)
    if stream == "compute" and on_gpu and category != "gpu_user_annotation":
        return None
    return None if stream == "wait" and on_gpu else stream


def _gaps(compute: Sequence[TraceEvent]) -> Iterator[TraceEvent]:
    """Waits: where a device was between two pairs of one pass."""
    for last, following in pairwise(sorted(compute, key=lambda event: event.begin)):
        name = last.name.partition(":")[0]
        if following.begin > last.end and following.name.partition(":")[0] == name:
            yield TraceEvent(last.rank, "wait", f"{name}: wait", last.end, following.begin)


def save(trace: Trace, path: Path) -> None:
    """Write Chrome's format: a process per rank, a thread per stream, times in microseconds."""
    lanes = (*STREAMS, "pass")
    entries: list[dict[str, Any]] = []
    for rank in trace.ranks:
        entries.append(_label("process_name", rank, 0, f"rank {rank}"))
        entries += [_label("thread_name", rank, i, stream) for i, stream in enumerate(lanes)]
    passes = [TraceEvent(trace.ranks[0], "pass", *mark) for mark in trace.marks]
    for event in (*trace.events, *passes):
        entries.append(
            {
                "name": event.name, "cat": event.stream, "ph": "X", "pid": event.rank,
                "tid": lanes.index(event.stream), "ts": 1e6 * (event.begin - trace.begin),
                "dur": 1e6 * (event.end - event.begin),
            }
        )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"traceEvents": entries, "displayTimeUnit": "ms", "otherData": {"title": trace.title}}
    path.write_text(json.dumps(record))


def _label(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}

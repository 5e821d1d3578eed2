# SPDX-License-Identifier: Apache-2.0
"""Events of attention in traces of torch's profiler, as three streams per rank.

`execution` marks each kernel call (one pair of chunks) and each wait with `record_function`.
Therefore this module can read profiles of the command `trace` and of training runs. The streams are
compute (a kernel call and the merge of its result), transfer (from posting a message until the rank
detects completion) and wait. On a GPU, compute and transfer are device times. A wait is then a gap
between two kernel calls of one pass, because the host runs ahead of the device.
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
PASS = "trace: "  # prefix of the profiler range of a whole pass (forward or backward)
# Pattern of the name of a profiler range -> stream.
NAMES = {
    "compute": re.compile(r".*: queries of rank \d+, keys of rank \d+$"),
    "wait": re.compile(r".*: wait, boundary \d+$"),
    "transfer": re.compile(r"gloo:(send|recv)$|nccl(Dev)?Kernel"),
    "pass": re.compile(re.escape(PASS)),
}


class TraceEvent(NamedTuple):
    """Event of one stream of a rank: a kernel call, a transfer or a wait.

    `begin` and `end` are seconds on one clock for all ranks.
    """

    rank: int
    stream: str
    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Trace:
    """Events of all ranks, on one clock.

    Attributes:
        title: Title of the picture.
        events: Events of the streams "compute", "transfer" and "wait".
        marks: (name, begin, end) of each pass, such as "forward", in seconds.
    """

    title: str
    events: tuple[TraceEvent, ...]
    marks: tuple[tuple[str, float, float], ...] = ()

    @classmethod
    def of_ranks(cls, title: str, events: Iterable[TraceEvent]) -> Trace:
        """Create a trace from the events of all ranks.

        Events of the stream "pass" become marks. A mark begins when the first rank begins the pass,
        and ends when the last rank ends it.

        Args:
            title: Title of the picture.
            events: Events of all streams and ranks.
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
        """Return the seconds in which a stream of a rank is busy; overlapping events count once."""
        total, until = 0.0, float("-inf")
        events = [e for e in self.events if (e.rank, e.stream) == (rank, stream)]
        for event in sorted(events, key=lambda event: event.begin):
            begin = max(event.begin, until)
            total += max(0.0, event.end - begin)
            until = max(until, event.end)
        return total


def load(paths: Sequence[Path]) -> Trace:
    """Read a trace from files in Chrome's format.

    Args:
        paths: One file of `save`, or one file of torch's profiler per rank.

    Raises:
        ValueError: A file is invalid or has no events of attention.
    """
    events: list[TraceEvent] = []
    title = ", ".join(path.stem for path in paths)
    for path in paths:
        try:
            record = json.loads(_text_of(path))
            title = record.get("otherData", {}).get("title", title)
            events += (profile := list(events_of(record)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} contains no trace of megatron-burst: {error}") from error
        if not profile:
            raise ValueError(
                f"{path} contains no trace of megatron-burst: it has no events of attention"
            )
    return Trace.of_ranks(title, events)


def _text_of(path: Path) -> str:
    """Return the text of a file. A .gz file (of Megatron-LM's profiler) is decompressed."""
    return gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()


def events_of(record: dict[str, Any]) -> Iterator[TraceEvent]:
    """Yield the attention events of one file in Chrome's format.

    Args:
        record: Content of a file of torch's profiler, or of a file of `save`. In a file of `save`,
            the process id is the rank.
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
    """Return the stream to which a trace entry belongs: "compute", "transfer", "wait" or "pass".

    None if the entry does not belong to attention, or is only a kernel launch on the host.
    """
    category, name = entry.get("cat"), entry["name"]
    if category in (*STREAMS, "pass"):
        return category
    stream = next((key for key, pattern in NAMES.items() if pattern.match(name)), None)
    if stream == "compute" and on_gpu and category != "gpu_user_annotation":
        return None
    return None if stream == "wait" and on_gpu else stream


def _gaps(compute: Sequence[TraceEvent]) -> Iterator[TraceEvent]:
    """Yield a wait event for each gap between two compute events of the same pass."""
    for last, following in pairwise(sorted(compute, key=lambda event: event.begin)):
        name = last.name.partition(":")[0]
        if following.begin > last.end and following.name.partition(":")[0] == name:
            yield TraceEvent(last.rank, "wait", f"{name}: wait", last.end, following.begin)


def save(trace: Trace, path: Path) -> None:
    """Write a trace in Chrome's format: one process per rank, one thread per stream."""
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


def _label(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}

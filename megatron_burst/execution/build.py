"""From a schedule to what one rank executes: its program, and what it computes with what.

Decides how the pair of two chunks is computed when these came in parts: part by part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from ..kernels.base import Kernel
from ..layout import Span
from ..masks import Mask
from ..schedule.bundles import spans_of
from ..schedule.held import held_bytes
from ..schedule.program import parts_of
from ..schedule.rings import Schedule
from ..schedule.tables import ALL, Chunk, Hop, Pair
from .executor import Call, Pass
from .row_maps import RowMaps

Shards = Sequence[Sequence[Span]]
OWN = "kv", "query"


class Works:
    """What a kernel plans for pairs of spans, once for each; shared by the passes of a plan."""

    def __init__(self, kernel: Kernel, mask: Mask, q_shards: Shards, k_shards: Shards):
        self.kernel, self.mask = kernel, mask
        self.shards = {"query": q_shards, "kv": k_shards}
        self._found: dict[tuple[Any, ...], Any] = {}

    def of(self, schedule: Schedule, queries: Chunk, keys: Chunk) -> Any:
        """What the kernel planned for these chunks; None if nothing is visible."""
        spans = self._spans(schedule, queries), self._spans(schedule, keys)
        if spans not in self._found:
            visible = all(spans)
            self._found[spans] = self.kernel.work_for(self.mask, *spans) if visible else None
        return self._found[spans]

    def _spans(self, schedule: Schedule, chunk: Chunk) -> tuple[Span, ...]:
        shard = self.shards[chunk.family][chunk.owner]
        if chunk.rows == ALL:
            return tuple(shard)
        ranges = schedule.tables.bundles(chunk.family).ranges(chunk.owner, chunk.rows)
        return tuple(spans_of(ranges, shard))


def make_pass(
    name: str,
    schedule: Schedule,
    rank: int,
    works: Works,
    device: torch.device,
    kept: Sequence[Chunk] = (),
) -> Pass:
    """What `rank` runs of a schedule. kept: what it leaves behind or finds."""
    program = schedule.program(rank)
    hops = [hop for boundary in program for hop in boundary.posts]
    copies = [*(Chunk(family, rank) for family in OWN), *schedule.kept_chunks(rank)]
    copies += [hop.chunk for hop in hops if hop.dst == rank and not hop.chunk.accumulated]
    calls = {pair: _calls(schedule, works, copies, pair) for b in program for pair in b.pairs}
    every = [call for each in calls.values() for call in each]
    partials = _partials(schedule, rank, hops, every)
    maps = RowMaps(schedule.tables)
    _learn(maps, copies, partials, rank, hops, every, kept)
    longest: dict[str, int] = defaultdict(int)
    for chunk in (*(hop.chunk for hop in hops), *partials.values(), *kept):
        maps.learn(chunk)
        longest[chunk.family] = max(longest[chunk.family], maps.count(chunk))
    maps.finish(device)
    deferred = schedule.program(rank, own_last=True)
    most = held_bytes(schedule.tables, program, rank, schedule.row_bytes)
    return Pass(name, program, calls, maps, partials, dict(longest), kept, deferred, most)


def _calls(
    schedule: Schedule, works: Works, copies: Sequence[Chunk], pair: Pair
) -> tuple[Call, ...]:
    """One call for every two parts of the chunks of a pair that see something."""
    found = []
    for queries in parts_of(copies, "query", pair.query, pair.query_rows):
        for keys in parts_of(copies, "kv", pair.key, pair.key_rows):
            work = works.of(schedule, queries, keys)
            if work is not None:
                found.append(Call(queries, keys, work))
    return tuple(found)


def _partials(
    schedule: Schedule, rank: int, hops: Sequence[Hop], calls: Sequence[Call]
) -> dict[tuple[str, int], Chunk]:
    """For every chunk of which this rank holds partial results: all rows that it ever holds."""
    families = ("out",) if schedule.row_bytes.out else ("dquery", "dkv")
    rows: dict[tuple[str, int], int] = defaultdict(int)
    for call in calls:
        for family in families:
            part = call.keys if family == "dkv" else call.queries
            rows[family, part.owner] |= part.rows
    for hop in hops:
        if hop.chunk.accumulated:
            rows[hop.chunk[:2]] |= hop.chunk.rows
    for family in families:
        rows[family, rank] = ALL
    return {(family, owner): Chunk(family, owner, of) for (family, owner), of in rows.items()}


def _learn(
    maps: RowMaps,
    copies: Sequence[Chunk],
    partials: dict[tuple[str, int], Chunk],
    rank: int,
    hops: Sequence[Hop],
    calls: Sequence[Call],
    kept: Sequence[Chunk],
) -> None:
    """Everything that the executor will ask."""
    for hop in hops:
        if hop.chunk.accumulated:
            maps.learn(partials[hop.chunk[:2]], hop.chunk.rows)
        elif hop.src == rank:
            (source,) = parts_of(copies, *hop.chunk)
            maps.learn(source, hop.chunk.rows)
    for call in calls:
        for part, families in ((call.queries, ("out", "dquery")), (call.keys, ("dkv",))):
            for family in families:
                if (family, part.owner) in partials:
                    maps.learn(part._replace(family=family))
                    maps.learn(partials[family, part.owner], part.rows)
    for chunk in kept:
        for part in parts_of(copies, *chunk):
            for buffer in (part, chunk):
                maps.learn(buffer, part.rows & chunk.rows)

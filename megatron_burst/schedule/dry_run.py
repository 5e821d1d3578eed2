# SPDX-License-Identifier: Apache-2.0
"""The buffers of one rank in one pass, computed by a replay of its program without tensors.

`dry_run` counts the buffers that `execution.ring`, `execution.buffers` and `execution.joined` use
for received chunks, partial results and messages. Plans, `show` and the memory account of `advise`
read the result.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from .demand import RowBytes
from .program import parts_of
from .rings import Schedule, totals_of
from .tables import ALL, Boundary, Chunk, Hop, Pair

# The state of the memory at one moment: kind -> number of rows of each buffer, ascending.
Moment = Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class HeldBuffers:
    """The buffers that a rank holds during a pass.

    The kinds of buffers are the families of tensors ("kv", "query", "dkv", "dquery", "out").
    Partial results that are sent in another dtype have a further kind, such as "dkv wire". "kv
    joined" and "dkv joined" are keys and their gradients in a joined call: one kernel call with
    several chunks of keys.

    Attributes:
        moments: Number of rows of every existing buffer by kind, at several moments of the pass.
            For any bytes per row, the moment with the largest memory is one of them. The rank's own
            sums of gradients are always counted.
        longest: Kind of buffer -> largest number of rows, as in `execution.rank_plan.RankPass`.
        in_use: Number of rows in use by kind, at several moments of the pass: rows of received
            chunks, of messages and of partial results for other ranks. A buffer may have room for
            more rows.
    """

    moments: tuple[Moment, ...]
    longest: Mapping[str, float]
    in_use: tuple[Mapping[str, int], ...] = ()

    @property
    def most(self) -> dict[str, int]:
        """The largest number of buffers of each kind that exist at the same time."""
        most: dict[str, int] = {}
        for moment in self.moments:
            for kind, rows in moment.items():
                most[kind] = max(most.get(kind, 0), len(rows))
        return most

    def scaled(self, factor: float) -> HeldBuffers:
        """Return a copy with all numbers of rows multiplied by `factor`."""
        moments = tuple(
            {kind: tuple(factor * n for n in rows) for kind, rows in moment.items()}
            for moment in self.moments
        )
        return HeldBuffers(
            moments, {family: factor * rows for family, rows in self.longest.items()}
        )

    def bytes(self, size: Callable[[str, float], float]) -> float:
        """Return the largest total bytes of all buffers that exist at the same time.

        Args:
            size: Function that returns the bytes of a buffer from its kind and its number of rows.
        """
        return max(
            sum(size(kind, rows) for kind, buffers in moment.items() for rows in buffers)
            for moment in self.moments
        )


def dry_run(
    schedule: Schedule, rank: int, *, wire: bool = False, packed: bool = False
) -> HeldBuffers:
    """Return the buffers that `rank` holds during a pass.

    Args:
        schedule: Schedule of the pass.
        rank: The rank.
        wire: True if partial results are not sent in the dtype of their sums.
        packed: True if the tensors of a message are packed into one buffer, as on a CPU. The rank's
            own rows are then copied before they are sent, and all buffers of a kind have room for
            the longest message. False if tensors are sent separately, as on a GPU.
    """
    return _Replay(schedule, rank, wire, packed).run()


def held_bytes(schedule: Schedule, rank: int, summed: RowBytes | None = None) -> int:
    """Return the peak bytes in use for received chunks and partial results for other ranks.

    Args:
        schedule: Schedule of the pass.
        rank: The rank.
        summed: Bytes per row of partial results in the dtype of their sums; None if they are sent
            in this dtype.
    """
    sent = schedule.row_bytes
    summed = summed or sent

    def size(kind: str, rows: int) -> int:
        family, _, dtype = kind.partition(" ")
        return rows * getattr(sent if dtype == "wire" else summed, family)

    buffers = dry_run(schedule, rank, wire=summed != sent)
    return max(
        sum(size(*kind_and_rows) for kind_and_rows in rows.items()) for rows in buffers.in_use
    )


def buffer_rows(rows: int, longest: int) -> int:
    """Return the capacity in rows of a new buffer: `longest`, or 1/4, 1/16, ... of it.

    Args:
        rows: Number of rows of the message; may be 0.
        longest: Number of rows of the longest message of the same kind.
    """
    capacity = longest
    # Divide by 4, not 2: a zigzag layout sends half chunks as often as whole chunks.
    while max(rows, 1) <= capacity // 4:
        capacity //= 4
    return max(capacity, rows)


class _ReplayBuffer(NamedTuple):
    """A buffer and the rows of the message in it.

    Attributes:
        room: Capacity of the buffer in rows.
        rows: Number of rows of the message in the buffer.
    """

    room: int = 0
    rows: int = 0


class _ReplayBuffers:
    """The buffers of one kind: the same as `execution.buffers.Buffers`, but without tensors.

    Attributes:
        longest: Largest number of rows of a message, or of a sum for rows of another rank.
        short: True if short messages get short buffers; False if all buffers have `longest` rows.
        used: Sum of the rows of all messages that are in buffers.
        rows: Capacity of a buffer in rows -> number of existing buffers.
    """

    def __init__(self, longest: int, short: bool):
        self.longest, self.short = longest, short
        self.used = 0
        self.rows: Counter[int] = Counter()
        self._free: Counter[int] = Counter()

    def take(self, rows: int) -> _ReplayBuffer:
        """Return a buffer for a message of `rows` rows."""
        self.used += rows
        least = buffer_rows(rows, self.longest) if self.short else max(self.longest, rows)
        free = min((size for size, n in self._free.items() if n and size >= least), default=0)
        if free:
            self._free[free] -= 1
            return _ReplayBuffer(free, rows)
        self.rows[least] += 1
        return _ReplayBuffer(least, rows)

    def give(self, buffer: _ReplayBuffer) -> None:
        self.used -= buffer.rows
        self._free[buffer.room] += 1

    def drop(self, buffer: _ReplayBuffer) -> None:
        """Remove a buffer that is in use, as if its memory were freed."""
        self.used -= buffer.rows
        self.rows[buffer.room] -= 1


class _Replay:
    """A replay of one rank's program, with row counts in place of tensors.

    It takes the same steps as the executor `execution.ring.Ring` and counts the buffers.
    """

    def __init__(self, schedule: Schedule, rank: int, wire: bool, packed: bool):
        self.schedule, self.me, self.wire, self.packed = schedule, rank, wire, packed
        self.program = schedule.program(rank)
        self.families = schedule.summed
        hops = [hop for boundary in self.program for hop in boundary.posts]
        own = [Chunk(family, rank) for family in ("kv", "query")]
        received = [h.chunk for h in hops if h.dst == rank and not h.chunk.accumulated]
        self.copies: dict[tuple[str, int], list[Chunk]] = defaultdict(list)  # by family and owner
        for chunk in (*own, *received):
            self.copies[chunk[:2]].append(chunk)
        calls = [call for b in self.program for pair in b.pairs for call in self._calls(pair)]
        self.totals = totals_of(schedule, rank, hops, calls)
        self.longest: dict[str, int] = defaultdict(int)
        for chunk in (hop.chunk for hop in hops):
            for kind in (chunk.family, f"{chunk.family} wire"):
                self.longest[kind] = max(self.longest[kind], self._count(chunk))
        for chunk in self.totals.values():
            if chunk.owner != rank:
                self.longest[chunk.family] = max(self.longest[chunk.family], self._count(chunk))
        # Pools of the computing stream; in `_relay`, those of the relay stream.
        self.buffers: dict[str, _ReplayBuffers] = {}
        self.beside: dict[str, _ReplayBuffers] = {}
        self.own_parts: dict[int, list[tuple[Chunk, _ReplayBuffer]]] = defaultdict(list)
        self.chains = schedule.chains
        self.moments: list[Moment] = []
        self.in_use: list[dict[str, int]] = []
        self.received: dict[Chunk, _ReplayBuffer] = {}
        self.sums: dict[Chunk, int] = {}  # totals that exist, and the rows that have a sum
        self.place: dict[Chunk, _ReplayBuffer] = {}  # buffers of the totals
        self.sent: dict[Chunk, _ReplayBuffer] = {}  # copies of rows that are being sent
        self.sends = Counter(hop.chunk for hop in hops if hop.src == rank)
        # By landing; the transfers of an exchange end together.
        self.flights: dict[int, list[list[tuple[Hop, _ReplayBuffer]]]] = defaultdict(list)
        # State of joined calls: rows of keys and of gradients by kind, totals that are still a part
        # of these gradients, and chunks that a call has freed.
        self.joined: dict[str, int] = {}
        self.waiting: set[Chunk] = set()
        self.freed: set[Chunk] = set()

    def run(self) -> HeldBuffers:
        for boundary in self.program:
            self._land(boundary.index)
            self._release(boundary)
            if boundary.index in self.chains:
                self._relay(boundary.index)
            elif not self.chains:
                self._post(boundary)
            self._note()
            self._land(boundary.index)
            self._compute(boundary)
            self._count_in_use()
        for family in self.families:
            self._total(family, self.me)
        self._note()
        unique = dict.fromkeys(tuple(sorted(moment.items())) for moment in self.moments)
        return HeldBuffers(tuple(map(dict, unique)), self.longest, tuple(self.in_use))

    def _note(self) -> None:
        """Append the numbers of rows of all current buffers, by kind, to `moments`.

        Only joined calls free buffers during the pass. Without joined calls, the last record has
        all buffers, so only this record is kept.
        """
        if self.schedule.joined:
            self._count_in_use()
        else:
            self.moments.clear()
        rows_of = defaultdict(Counter)
        for kind, buffers in (*self.buffers.items(), *self.beside.items()):
            rows_of[kind].update(buffers.rows)  # a pool may drop a buffer of another pool
        moment = {kind: [*rows.elements()] for kind, rows in rows_of.items()}
        for kind, rows in self.joined.items():
            moment[kind] = [rows]
        own = [self.totals[family, self.me] for family in self.families if family != "out"]
        for chunk in own:
            if chunk not in self.sums.keys() - self.waiting:
                moment.setdefault(chunk.family, []).append(self._count(chunk))
        self.moments.append({kind: tuple(sorted(rows)) for kind, rows in moment.items() if rows})

    def _count_in_use(self) -> None:
        rows: dict[str, int] = defaultdict(int)
        for kind, buffers in (*self.buffers.items(), *self.beside.items()):
            rows[kind] += buffers.used
        rows |= self.joined
        for family in self.families:
            own = self.place.get(self.totals[family, self.me], _ReplayBuffer())
            rows[family] = rows.get(family, 0) - own.rows
        self.in_use.append(rows)

    def _release(self, boundary: Boundary) -> None:
        for chunk in boundary.release:
            if chunk not in self.freed:
                self._give(chunk.family, self.received.pop(chunk))

    def _post(self, boundary: Boundary) -> None:
        # In the executor's order: by exchange, and sends before receives.
        order = {hop: (hop.ring, hop.chunk.accumulated, hop.land, hop.dst == self.me)
                 for hop in boundary.posts}  # fmt: skip
        in_order = sorted(order, key=order.__getitem__)
        for (_, _, land), hops in groupby(in_order, lambda hop: order[hop][:3]):
            exchange: list[tuple[Hop, _ReplayBuffer]] = []
            self.flights[land].append(exchange)
            for hop in hops:
                chunk, buffer = hop.chunk, _ReplayBuffer()
                if hop.dst == self.me:
                    buffer = self._take(self._kind(chunk), chunk)
                elif chunk.accumulated:
                    buffer = self._send(chunk)
                elif self.packed and chunk not in self.sent and chunk not in self.received:
                    self.sent[chunk] = self._take(chunk.family, chunk)
                exchange.append((hop, buffer))

    def _relay(self, begin: int) -> None:
        """Replay the chain of transfers that the relay stream starts at boundary `begin`."""
        self.buffers, self.beside = self.beside, self.buffers
        for boundary in self.program[self.chains[begin]]:
            self._land(boundary.index, relayed=True)
            self._post(boundary)
        self.buffers, self.beside = self.beside, self.buffers

    def _land(self, index: int, relayed: bool = False) -> None:
        if not relayed:
            for part in self.own_parts.pop(index, []):
                self._receive(*part)
        for exchange in self.flights.pop(index, []):
            for hop, buffer in exchange:  # sends are before receives
                chunk = hop.chunk
                if hop.src == self.me:
                    self._sent(chunk, buffer)
                elif relayed and chunk.accumulated and chunk.owner == self.me:
                    self.own_parts[index].append((chunk, buffer))
                elif chunk.accumulated:
                    self._receive(chunk, buffer)
                else:
                    self.received[chunk] = buffer

    def _sent(self, chunk: Chunk, buffer: _ReplayBuffer) -> None:
        """Free the buffer of a chunk that was sent, unless it is sent again."""
        self.sends[chunk] -= 1
        if chunk.accumulated:
            self._give(self._kind(chunk), buffer)
        elif chunk in self.sent and not self.sends[chunk]:
            self._give(chunk.family, self.sent.pop(chunk))

    def _compute(self, boundary: Boundary) -> None:
        calls = [(pair, *call) for pair in boundary.pairs for call in self._calls(pair)]
        together: list[Chunk] = []
        if self.schedule.joined:
            # Without `visibility.joined`, a rank's own keys are a separate call.
            own = self.schedule.visibility.joined
            together = [keys for _, _, keys in calls if own or keys.owner != self.me]
        if len(together) > 1:
            self._join(together, boundary.index)
        for pair, queries, keys in calls:
            temporary = []
            for family in self.families:
                part, rows = (
                    (keys, pair.key_rows) if family == "dkv" else (queries, pair.query_rows)
                )
                total = self.totals[family, part.owner]
                if self._waits(total, part, keys in together):
                    self.sums[total] = rows & part.rows
                    self.waiting.add(total)
                else:
                    self.sums[self._total(family, part.owner)] |= rows & part.rows
                    if self._scattered(total, part.rows):
                        temporary.append((family, self._take(family, part._replace(family=family))))
            for family, buffer in temporary:
                self._give(family, buffer)

    def _scattered(self, total: Chunk, rows: int) -> bool:
        """Return True if some rows of a sum are not consecutive in its buffer.

        A kernel call then writes to a temporary buffer, which is added to the sum.

        Args:
            total: Chunk with all rows of the sum.
            rows: Bit set of the rows of the kernel call.
        """
        bundles = self.schedule.tables.bundles(total.family)
        return rows != total.rows and len(bundles.places(total.owner, total.rows, rows)) > 1

    def _waits(self, total: Chunk, part: Chunk, joined: bool) -> bool:
        """Return True if a sum of key gradients is still in the buffer of a joined call.

        The sum then needs no buffer of its own.

        Args:
            total: Chunk with all rows of the sum.
            part: Chunk of the kernel call.
            joined: True if the kernel call reads several chunks of keys.
        """
        made = joined and "dkv joined" in self.joined and total.family == "dkv"
        return made and total not in self.sums and total.rows == part.rows

    def _join(self, together: Sequence[Chunk], index: int) -> None:
        """Replay a joined call: one kernel call that computes with several chunks of keys.

        The call copies the chunks into one buffer, frees the chunks that have no other use, and
        then allocates a buffer for their gradients.

        Args:
            together: Chunks of keys.
            index: Number of the step.
        """
        rows = sum(map(self._count, together))
        self.joined["kv joined"] = rows
        self._note()
        (arrived, left), uses = self._leaving(), Counter(together)
        next_boundary = self.program[index + 1 : index + 2] if index >= arrived else ()
        for chunk in (chunk for boundary in next_boundary for chunk in boundary.release):
            if uses[chunk] == 1 and left.get(chunk, 0) <= index:
                self.freed.add(chunk)
                self._pool(chunk.family).drop(self.received.pop(chunk))
        if len(self.families) > 1:
            # With a relay stream, gradients of earlier calls exist until the pass ends.
            before = self.joined.get("dkv joined", 0) if self.chains else 0
            self.joined["dkv joined"] = before + rows
        self._note()
        del self.joined["kv joined"]

    def _leaving(self) -> tuple[int, dict[Chunk, int]]:
        """Return when receives of copies start, and when sends of copies end.

        Boundary t is the moment before step t.

        Returns:
            Boundary at which the last receive starts; a map from each chunk to the boundary at
            which its last send ends.
        """
        hops = [h for b in self.program for h in b.posts if not h.chunk.accumulated]
        arrive = {hop.chunk: hop.post for hop in hops if hop.dst == self.me}
        left: dict[Chunk, int] = defaultdict(int)
        for hop in (hop for hop in hops if hop.src == self.me):
            sent = hop.chunk if hop.chunk in arrive else parts_of(self.copies, hop.chunk)[0]
            left[sent] = max(left[sent], hop.land)
        return max(arrive.values(), default=0), left

    def _receive(self, chunk: Chunk, buffer: _ReplayBuffer) -> None:
        total, kind = self.totals[chunk[:2]], self._kind(chunk)
        if total == chunk and total not in self.sums and kind == chunk.family:
            self.sums[total], self.place[total] = chunk.rows, buffer
            return
        self.sums[self._total(*chunk[:2])] |= chunk.rows
        self._give(kind, buffer)

    def _send(self, chunk: Chunk) -> _ReplayBuffer:
        """Return the buffer from which the partial results in `chunk` are sent."""
        total, kind = self._total(*chunk[:2]), self._kind(chunk)
        self.sums[total] &= ~chunk.rows
        if total == chunk and kind == chunk.family:
            del self.sums[total]  # the sum is the message
            return self.place.pop(total, _ReplayBuffer())
        buffer = self._take(kind, chunk)
        if not self.sums[total]:
            del self.sums[total]
            self._give(chunk.family, self.place.pop(total, _ReplayBuffer()))
        return buffer

    def _total(self, family: str, owner: int) -> Chunk:
        """Return the chunk in which this rank sums partial results for an owner.

        Its buffer is counted at first use. The rank's own outputs need no buffer.
        """
        chunk = self.totals[family, owner]
        if chunk in self.sums and chunk not in self.waiting:
            return chunk
        self.sums.setdefault(chunk, 0)
        if family != "out" or chunk.rows != ALL:
            self.place[chunk] = self._take(family, chunk)
        if chunk in self.waiting:
            self.waiting.remove(chunk)
            if not self.waiting and not self.chains:
                self._note()
                del self.joined["dkv joined"]
        return chunk

    def _take(self, kind: str, chunk: Chunk) -> _ReplayBuffer:
        return self._pool(kind).take(self._count(chunk))

    def _give(self, kind: str, buffer: _ReplayBuffer) -> None:
        if buffer.room:  # without room, the rows have separate tensors
            self._pool(kind).give(buffer)

    def _pool(self, kind: str) -> _ReplayBuffers:
        if kind not in self.buffers:
            self.buffers[kind] = _ReplayBuffers(self.longest[kind], not self.packed)
        return self.buffers[kind]

    def _kind(self, chunk: Chunk) -> str:
        return f"{chunk.family} wire" if chunk.accumulated and self.wire else chunk.family

    def _count(self, chunk: Chunk) -> int:
        return self.schedule.tables.bundles(chunk.family).count(chunk.owner, chunk.rows)

    def _calls(self, pair: Pair) -> list[tuple[Chunk, Chunk]]:
        queries = parts_of(self.copies, Chunk("query", pair.query, pair.query_rows))
        keys = parts_of(self.copies, Chunk("kv", pair.key, pair.key_rows))
        return [(q, k) for q in queries for k in keys]

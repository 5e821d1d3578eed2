"""NCCL's rules for ranks that share a process: what they really posted and waited for, replayed.

`record` puts a recorder before all endpoints of every rank of an in-process grid. Run anything on
the grid, then ask for `faults`: messages that do not fit each other, exchanges that nobody waited
for, and deadlocks, by rules at least as strict as NCCL's:

- The operations of a communicator run in the order in which they were posted, each batch when the
  one before is complete, and a batch is complete when all of its messages are. From rank to rank
  messages match in order, whatever they are.
- `connections`: the first message from a rank to another on a communicator keeps both hosts in
  their posts, until every batch that such a first message links them to has been posted.
- `one_queue`: the device runs one operation at a time, in the order of the host
  (CUDA_DEVICE_MAX_CONNECTIONS=1). Otherwise a batch waits for those before it on its communicator,
  and for what the computing stream was told to wait for.
- `host_waits`: the host does not go on before what it waits for is complete.

Each rank has a computing stream and a relay stream (`comm.relays`). A batch starts after what the
stream of its post was told to wait for; a chain of the relay stream starts after what the computing
stream waits for at this time. Whatever the rules, rows are sent by a stream that waits for the
batch that received them.

Kernels are not recorded: they wait for nothing but what was waited for before them. Which channel
travels on which communicator is a function of (rank, channel), one of `COMMUNICATORS`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from itertools import zip_longest
from typing import NamedTuple

import torch

from megatron_burst.comm import packing
from megatron_burst.comm.packing import Envelope
from megatron_burst.comm.transport import Channel, all_to_all_by_messages
from megatron_burst.plugins.testing.in_process import InProcessGroups
from megatron_burst.schedule.topology import Topology

Communicator = Callable[[int, Channel], Hashable]


COMPUTING, RELAY = "computing", "relay"


class Sent(NamedTuple):
    """One message that a rank posted for the grid's rank `peer`; flat: with its envelope.

    received_by: the last post of this rank that received into the same memory, or None.
    """

    peer: int
    parts: tuple[tuple[torch.Size, torch.dtype], ...]
    flat: torch.Tensor | None
    received_by: int | None = None


class Wanted(NamedTuple):
    """One message that a rank posted room for, from the grid's rank `peer`."""

    peer: int
    parts: tuple[tuple[torch.Size, torch.dtype], ...]
    envelope: Envelope


class Post(NamedTuple):
    channel: Channel
    sent: tuple[Sent, ...]
    wanted: tuple[Wanted, ...]
    label: str
    stream: str = COMPUTING


class Wait(NamedTuple):
    post: int  # where in the trace
    stream: str = COMPUTING


class Fork(NamedTuple):
    """The relay stream waits for the computing stream."""


class Mark(NamedTuple):
    """A place on the relay stream."""

    name: Hashable


class Join(NamedTuple):
    """The computing stream waits for a mark."""

    name: Hashable


Trace = list[Post | Wait | Fork | Mark | Join]
At = tuple[int, int]  # rank, index in its trace


class Rules(NamedTuple):
    """Which of NCCL's rules hold; see the module."""

    connections: bool = True
    one_queue: bool = True
    host_waits: bool = True


STRICT = Rules()
STREAMS = Rules(one_queue=False, host_waits=False)


# --- recording ------------------------------------------------------------------------------


def record(groups: InProcessGroups) -> list[Trace]:
    """From now on the trace of every rank fills as it posts and waits."""
    traces: list[Trace] = [[] for _ in groups.ranks]
    for rank, trace in zip(groups.ranks, traces, strict=True):
        rank.ring, rank.ulysses = _Recorder(rank.ring, trace), _Recorder(rank.ulysses, trace)
        rank.grid = _Recorder(rank.grid, trace)
    return traces


class _Recorder:
    def __init__(self, real, trace: Trace):
        self.real, self.trace, self.stream = real, trace, COMPUTING
        self.received: dict[int, int] = {}  # memory -> the last post that receives into it

    def __getattr__(self, name):
        return getattr(self.real, name)

    def exchange(self, channel, sends, receives, label):
        def parts(message):
            return tuple((t.shape, t.dtype) for t in message.tensors)

        ranks, at = self.real.ranks, len(self.trace)
        sent = [
            Sent(ranks[m.peer], parts(m), _copy(m.flat), self.received.get(_memory(m.tensors)))
            for m in sends
        ]
        wanted = (Wanted(ranks[m.peer], parts(m), m.envelope) for m in receives)
        self.trace.append(Post(channel, tuple(sent), tuple(wanted), label, self.stream))
        self.received |= {_memory(m.tensors): at for m in receives}
        return _Waited(self.real.exchange(channel, sends, receives, label), self, at)

    def relays(self, device):
        return _RecordedRelays(self.real.relays(device), self)

    def all_to_all(self, trade):
        all_to_all_by_messages(self, trade)  # NCCL does the same, one batch or one per tensor


class _Waited(NamedTuple):
    real: object
    recorder: _Recorder
    at: int

    def wait(self):
        self.recorder.trace.append(Wait(self.at, self.recorder.stream))
        self.real.wait()


class _RecordedRelays:
    def __init__(self, real, recorder: _Recorder):
        self.real, self.recorder, self.memory = real, recorder, real.memory
        self.marks: set[int] = set()

    def start(self, work):
        def relayed():
            self.recorder.stream = RELAY
            try:
                work()
            finally:
                self.recorder.stream = COMPUTING

        self.recorder.trace.append(Fork())
        self.real.start(relayed)

    def mark(self, boundary):
        self.marks.add(boundary)
        self.recorder.trace.append(Mark((id(self), boundary)))
        self.real.mark(boundary)

    def wait(self, boundary):
        self.real.wait(boundary)
        if boundary in self.marks:
            self.marks.remove(boundary)
            self.recorder.trace.append(Join((id(self), boundary)))


def _memory(tensors) -> int:
    return tensors[0].untyped_storage().data_ptr() if tensors else 0


def _copy(flat):
    return None if flat is None else flat.clone()


# --- which communicator ---------------------------------------------------------------------


def members(topology: Topology, rank: int, channel: Channel) -> tuple[int, ...]:
    """The ranks of a channel, by hand, in ascending order."""
    if channel.ring == "ulysses":
        return tuple(sorted(topology.ulysses_group(rank)))
    if channel.ring == "grid":
        return tuple(range(topology.size))
    ring, width = topology.ring(rank), topology.intra_size
    node, index = divmod(ring.index(rank), width)
    parts = {"flat": ring, "intra": ring[node * width :][:width], "inter": ring[index::width]}
    return tuple(sorted(parts[channel.ring]))


# name -> topology -> the communicator of a channel. "gradients apart" is what `comm` makes of
# process groups: rings over the same ranks share, also with a group that Megatron made.
COMMUNICATORS: dict[str, Callable[[Topology], Communicator]] = {
    "all apart": lambda t: lambda rank, channel: (members(t, rank, channel), channel),
    "gradients apart": lambda t: lambda r, channel: (members(t, r, channel), channel.gradient),
    "shared": lambda t: lambda rank, channel: members(t, rank, channel),
}


# --- replaying ------------------------------------------------------------------------------


def faults(
    traces: list[Trace], communicator: Communicator, rules: tuple[Rules, ...] = (STRICT, STREAMS)
) -> list[str]:
    """What is wrong with these traces; what does not match is not replayed."""
    matching = _Matching(traces, communicator)
    found = matching.faults + _not_waited_for(traces) or _not_landed(traces)
    return found or [
        f"{fault} ({one})" for one in rules for fault in _Replay(traces, matching, one).run()
    ]


def _not_waited_for(traces: list[Trace]) -> list[str]:
    waits = [Counter(e.post for e in trace if isinstance(e, Wait)) for trace in traces]
    return [
        f"rank {rank} waited {waits[rank][at]} times: {event.label}"
        for rank, trace in enumerate(traces)
        for at, event in enumerate(trace)
        if isinstance(event, Post) and waits[rank][at] != 1
    ]


def _not_landed(traces: list[Trace]) -> list[str]:
    return [
        f"rank {rank} sends rows that have not landed: {event.label}"
        for rank, trace in enumerate(traces)
        for event, waited in zip(trace, _Streams.of(trace), strict=True)
        if isinstance(event, Post)
        for message in event.sent
        if message.received_by is not None and message.received_by not in waited
    ]


class _Streams:
    """The posts for which the streams of one rank wait."""

    def __init__(self):
        self.waited: dict[str, set[int]] = {COMPUTING: set(), RELAY: set()}
        self.marks: dict[Hashable, set[int]] = {}

    @classmethod
    def of(cls, trace: Trace) -> list[set[int]]:
        """For what the stream of each event waits, before the event."""
        streams, found = cls(), []
        for event in trace:
            found.append(set(streams.waited[getattr(event, "stream", COMPUTING)]))
            streams.take(event)
        return found

    def take(self, event: Post | Wait | Fork | Mark | Join) -> None:
        if isinstance(event, Wait):
            self.waited[event.stream].add(event.post)
        elif isinstance(event, Fork):
            self.waited[RELAY] |= self.waited[COMPUTING]
        elif isinstance(event, Mark):
            self.marks[event.name] = set(self.waited[RELAY])
        elif isinstance(event, Join):
            self.waited[COMPUTING] |= self.marks.pop(event.name)


class _Matching:
    """Which posts exchange something; `faults`: what does not fit.

    partners: of a post, those it exchanges messages with. linked: of a post with first messages,
    all posts that these, and first messages of their posts, link it to.
    """

    def __init__(self, traces: list[Trace], communicator: Communicator):
        self.faults: list[str] = []
        self.partners: dict[At, set[At]] = defaultdict(set)
        self.linked: dict[At, set[At]] = {}
        self.communicator: dict[At, Hashable] = {}
        ways: dict[tuple, tuple[list, list]] = defaultdict(lambda: ([], []))
        for rank, trace in enumerate(traces):
            for at, post in enumerate(trace):
                if isinstance(post, Post):
                    key = self.communicator[rank, at] = communicator(rank, post.channel)
                    for message in post.sent:
                        ways[key, rank, message.peer][0].append((message, (rank, at), post.label))
                    for message in post.wanted:
                        ways[key, message.peer, rank][1].append((message, (rank, at), post.label))
        for way, ends in ways.items():
            for number, pair in enumerate(zip_longest(*ends)):
                self._match(number, *pair, f"message {number} from rank {way[1]} to {way[2]}")

    def _match(self, number: int, sent, wanted, which: str) -> None:
        if sent is None or wanted is None:
            said, end = ("receive", sent) if wanted is None else ("send", wanted)
            self.faults.append(f"{which} has no {said}: {end[2]}")
            return
        (out, a, label), (into, b, other) = sent, wanted
        if out.parts != into.parts:
            self.faults.append(f"{which}: {out.parts} into {into.parts}: {label} | {other}")
        elif out.flat is not None and packing.mismatch(out.flat, into.envelope):
            self.faults.append(f"{which} is another: {label} | {other}")
        self.partners[a].add(b)
        self.partners[b].add(a)
        if number == 0:
            both = self.linked.get(a, {a}) | self.linked.get(b, {b})
            self.linked |= dict.fromkeys(both, both)


class _Replay:
    """Hosts and devices go on until none of them can."""

    def __init__(self, traces: list[Trace], matching: _Matching, rules: Rules):
        self.traces, self.matching, self.rules = traces, matching, rules
        self.next = [0] * len(traces)  # of each host
        self.posted: set[At] = set()
        self.waiting: dict[At, set[At]] = {}  # issued, not started -> what it starts after
        self.started: set[At] = set()
        self.done: set[At] = set()
        self.last: dict[tuple[int, Hashable], At] = {}  # the last of a queue or communicator
        self.streams = [_Streams() for _ in traces]

    def run(self) -> list[str]:
        while any([self._host(rank) for rank in range(len(self.traces))] + [self._devices()]):
            pass
        stuck = [
            (rank, at if at < len(trace) else min(a for r, a in self._unfinished if r == rank))
            for rank, (at, trace) in enumerate(zip(self.next, self.traces, strict=True))
            if at < len(trace) or any(r == rank for r, _ in self._unfinished)
        ]
        words = [f"rank {rank} at {self._words(rank, at)}" for rank, at in stuck]
        return [f"deadlock: {'; '.join(words)}"] if words else []

    @property
    def _unfinished(self) -> set[At]:
        return self.posted - self.done

    def _words(self, rank: int, at: int) -> str:
        event = self.traces[rank][at]
        return (
            event.label if isinstance(event, Post) else f"wait of {self._words(rank, event.post)}"
        )

    def _host(self, rank: int) -> bool:
        """Does the host of this rank get any further?"""
        before = self.next[rank], len(self.posted)
        while self.next[rank] < len(self.traces[rank]):
            at = rank, self.next[rank]
            event = self.traces[rank][at[1]]
            waits = self.rules.host_waits and isinstance(event, Wait)
            if waits and (rank, event.post) not in self.done:
                break
            if not isinstance(event, Post):
                self.streams[rank].take(event)
            else:
                self.posted.add(at)
                linked = self.matching.linked.get(at, set())
                if self.rules.connections and not linked <= self.posted:
                    break
                self._issue(rank, at)
            self.next[rank] += 1
        return before != (self.next[rank], len(self.posted))

    def _issue(self, rank: int, at: At) -> None:
        queue = rank, None if self.rules.one_queue else self.matching.communicator[at]
        before = {self.last[queue]} if queue in self.last else set()
        stream = self.traces[rank][at[1]].stream
        waited = {(rank, post) for post in self.streams[rank].waited[stream]}
        self.waiting[at] = before if self.rules.one_queue else before | waited
        self.last[queue] = at

    def _devices(self) -> bool:
        """Does any operation start or end?"""
        before = len(self.started), len(self.done)
        ready = [at for at, needs in self.waiting.items() if needs <= self.done]
        for at in ready:
            del self.waiting[at]
        self.started.update(ready)
        partners = self.matching.partners
        self.done |= {at for at in self.started - self.done if partners[at] <= self.started}
        return before != (len(self.started), len(self.done))

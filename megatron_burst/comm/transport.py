# SPDX-License-Identifier: Apache-2.0
"""Moving tensors between the ranks of a grid, and counting what moved.

`Endpoint` is one rank's end of a transport: here that of torch.distributed, on a process group for
each ring, kind of traffic (activations and gradients on one communicator give wrong results,
BurstEngine section 3.1) and type of device. The plugin `testing` has one for ranks in one process.
Decides what an exchange is and what its failure says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.distributed as dist

from . import packing
from .packing import NO_CALL, Envelope, Message, Shapes

if TYPE_CHECKING:
    from .waits import WaitClock

Tensors = Sequence[torch.Tensor]


class Channel(NamedTuple):
    """A ring ("flat", "intra", "inter"), "ulysses" or "grid" (all ranks, in the order of their
    numbers), and whether it carries gradients.
    """

    ring: str
    gradient: bool


class Send(NamedTuple):
    """Contiguous tensors for member `peer` of the channel, over `link` ("intra" or "inter").

    flat: the buffer of a packed message that holds all of them.
    """

    peer: int
    link: str
    tensors: Tensors
    flat: torch.Tensor | None = None


class Receive(NamedTuple):
    """Contiguous tensors to be filled from member `peer`.

    message: what holds them, to be received as one; envelope: what it must bear.
    """

    peer: int
    tensors: Tensors
    message: Message | None = None
    envelope: Envelope = Envelope(NO_CALL, 0)


class Trade(NamedTuple):
    """An all-to-all: `parts[i][peer]` of this rank goes into `into[i]` of the peer, at the rank of
    this one. into: contiguous; links: to each peer; envelope: where there are messages.
    """

    channel: Channel
    parts: Tensors
    into: Tensors
    links: Sequence[str]
    envelope: Envelope
    label: object


class Pending(Protocol):
    """A started exchange: `wait` returns when all it sends may be reused and all arrived (with NCCL
    for what the current stream does next; torch up to 2.7 frees such buffers later).
    """

    def wait(self) -> None: ...


@dataclass
class Counters:
    """Payload bytes sent by one rank, by link class."""

    intra: int = 0
    inter: int = 0

    def add(self, sends: Iterable[Send]) -> None:
        for send in sends:
            size = sum([t.nbytes for t in send.tensors])
            if send.link == "intra":
                self.intra += size
            else:
                self.inter += size

    def reset(self) -> None:
        self.intra = self.inter = 0


class Endpoint(Protocol):
    """One rank's end of a transport; `rank` and peers count from 0 in what it joins.

    `exchange` starts transfers and does not block; the str of `label` is what errors say of it.
    `all_to_all` returns when all arrived. `released` says that nobody here reads these tensors
    again before they are written to.
    """

    rank: int
    counters: Counters
    room: int  # bytes that a receive buffer on the CPU has at least

    def exchange(
        self, channel: Channel, sends: Sequence[Send], receives: Sequence[Receive], label: object
    ) -> Pending: ...

    def all_to_all(self, trade: Trade) -> None: ...

    def released(self, tensors: Tensors) -> None: ...


def exchanged(
    endpoint: Endpoint,
    channel: Channel,
    sends: Iterable[Send],
    wanted: Mapping[int, Shapes],
    device: torch.device,
    envelope: Envelope,
    label: object,
) -> dict[int, Tensors]:
    """What came from each peer, tensors of the shapes that are `wanted` of it, while `sends` (whose
    tensors need not be contiguous) went. On the CPU what goes to one peer is one message.
    """
    packed = device.type == "cpu"
    sent, received = [], []
    for peer, link, tensors, _ in sends:
        if packed:
            message = packing.pack(tensors, envelope)
            sent.append(Send(peer, link, message.tensors, message.flat))
        else:
            sent.append(Send(peer, link, [t.contiguous() for t in tensors]))
    for peer, shapes in wanted.items():
        if packed:
            room = packing.empty(shapes, device, endpoint.room)
            received.append(Receive(peer, room.tensors, room, envelope))
        else:
            fresh = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]
            received.append(Receive(peer, fresh))
    if sent or received:
        endpoint.exchange(channel, sent, received, label).wait()
    return {receive.peer: receive.tensors for receive in received}


def all_to_all_by_messages(endpoint: Endpoint, trade: Trade) -> None:
    """`Endpoint.all_to_all` as one exchange: one message to and one from every other rank."""
    channel, parts, into, links, envelope, label = trade
    me, device = endpoint.rank, into[0].device
    peers = [peer for peer in range(len(links)) if peer != me]
    sends = [Send(peer, links[peer], [part[peer] for part in parts]) for peer in peers]
    shapes = [(t.shape[1:], t.dtype) for t in into]
    wanted = dict.fromkeys(peers, shapes)
    arrived = exchanged(endpoint, channel, sends, wanted, device, envelope, label)
    for peer, tensors in (*arrived.items(), (me, [part[me] for part in parts])):
        for target, tensor in zip(into, tensors, strict=True):
            target[peer].copy_(tensor)


@dataclass
class _Works:
    """Only `wait` tells: with gloo `is_completed` may stay False for good."""

    works: list[dist.Work]
    ops: Sequence[dist.P2POp]
    receives: Sequence[Receive]  # whose envelopes are to be read
    label: object

    def wait(self) -> None:
        for number, work in enumerate(self.works):
            try:
                work.wait()
            except RuntimeError as error:
                # NCCL makes one work of all operations.
                ops = self.ops if len(self.works) != len(self.ops) else [self.ops[number]]
                raise _failed(self.label, f"{_words(ops)}: {error}") from error
        for receive in self.receives:
            if receive.message is None or receive.message.flat is None:
                continue
            complaint = packing.mismatch(receive.message.flat, receive.envelope)
            if complaint:
                raise _failed(self.label, f"from member {receive.peer} of the group: {complaint}")


@dataclass
class ProcessEndpoint:
    """An end of the torch.distributed transport. clock: measures its waits, if there is one."""

    rank: int
    ranks: Sequence[int]  # peer -> global rank
    channels: Mapping[tuple[Channel, str], dist.ProcessGroup]  # by type of device too
    counters: Counters = field(default_factory=Counters)
    room: int = 0
    clock: WaitClock | None = None

    def exchange(
        self, channel: Channel, sends: Sequence[Send], receives: Sequence[Receive], label: object
    ) -> Pending:
        some = (sends[0] if sends else receives[0]).tensors[0]
        group, ops = self.channels[channel, some.device.type], []
        for receive in receives:
            buffers, message, peer = receive.tensors, receive.message, self.ranks[receive.peer]
            if message is not None and message.flat is not None:
                buffers = [message.flat]
                if some.is_cpu and message.room is not None:  # more may come than is expected
                    message.flat[-packing.ENVELOPE :] = 0  # an old one must not pass for a new one
                    buffers = [message.room]
            for buffer in buffers:
                ops.append(dist.P2POp(dist.irecv, buffer, peer, group))
        for send in sends:
            peer = self.ranks[send.peer]
            for tensor in send.tensors if send.flat is None else (send.flat,):
                ops.append(dist.P2POp(dist.isend, tensor, peer, group))
        self.counters.add(sends)
        try:
            works = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            raise _failed(label, f"{_words(ops)}: {error}") from error
        started = _Works(works, ops, receives if some.is_cpu else (), label)
        return started if self.clock is None else self.clock.timed(started, some.is_cpu)

    def all_to_all(self, trade: Trade) -> None:
        """On the CPU by messages, whose envelopes tell a rank that is out of step."""
        some = trade.into[0]
        group = self.channels[trade.channel, some.device.type]
        # A collective has the order of its group, which torch sorts.
        if some.is_cpu or dist.get_process_group_ranks(group) != list(self.ranks):
            all_to_all_by_messages(self, trade)
        else:
            self._collectives(group, trade)

    def _collectives(self, group: dist.ProcessGroup, trade: Trade) -> None:
        """One per tensor, from where it lies contiguous and to where it belongs."""
        works, label = [], trade.label
        self.counters.add(
            Send(peer, link, tuple(part[peer] for part in trade.parts))
            for peer, link in enumerate(trade.links)
            if peer != self.rank
        )
        try:
            for target, part in zip(trade.into, trade.parts, strict=True):
                source = part.contiguous()
                works.append(dist.all_to_all_single(target, source, group=group, async_op=True))
        except RuntimeError as error:
            raise _failed(label, f"{_words(())}: {error}") from error
        started = _Works(works, (), (), label)
        (started if self.clock is None else self.clock.timed(started, False)).wait()

    def released(self, tensors: Tensors) -> None:
        pass


def _words(ops: Sequence[dist.P2POp]) -> str:
    """What each operation does; without any it was a collective."""
    return (
        ", ".join(
            f"{'receiving from' if op.op is dist.irecv else 'sending to'} rank {op.peer}"
            for op in ops
        )
        or "all-to-all"
    )


def _failed(label: object, reason: str) -> RuntimeError:
    return RuntimeError(f"exchange failed: {label}: {reason}")

# SPDX-License-Identifier: Apache-2.0
"""Transport of tensors between the ranks of a grid, and counters of the sent bytes.

An exchange is a batch of sends and receives on one channel. `Endpoint` is the interface of one rank
to a transport. `ProcessEndpoint` implements it with torch.distributed. It uses one process group
for each ring, each kind of traffic and each device type. Activations and gradients need separate
communicators, otherwise results are wrong (BurstEngine section 3.1). The plugin `testing` has an
endpoint for ranks in one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.distributed as dist

from . import packing
from .packing import NO_CALL, Envelope, Message, Shapes
from .relays import InOrder, Relays, StreamRelays

if TYPE_CHECKING:
    from .waits import WaitClock

Tensors = Sequence[torch.Tensor]


class Channel(NamedTuple):
    """A group of ranks and a kind of traffic, for which one process group exists.

    Attributes:
        ring: Group of ranks: "flat" (the whole ring), "intra" (the ring within a node), "inter"
            (the ring between nodes), "ulysses" (the ulysses group) or "grid" (all ranks).
        gradient: True for gradients and other partial results, False for copies.
    """

    ring: str
    gradient: bool


class Send(NamedTuple):
    """Contiguous tensors to send.

    Attributes:
        peer: Rank that receives the tensors, as an index of the endpoint.
        link: Link class for the counters: "intra" or "inter".
        tensors: The tensors.
        flat: Message in one buffer that contains all tensors, or None.
    """

    peer: int
    link: str
    tensors: Tensors
    flat: torch.Tensor | None = None


class Receive(NamedTuple):
    """Contiguous tensors to receive.

    Attributes:
        peer: Rank that sends the tensors, as an index of the endpoint.
        tensors: Tensors to fill.
        message: Message that contains the tensors, if they are received as one message; else None.
        envelope: Expected envelope of the message.
    """

    peer: int
    tensors: Tensors
    message: Message | None = None
    envelope: Envelope = Envelope(NO_CALL, 0)


class AllToAll(NamedTuple):
    """An all-to-all: `parts[i][peer]` of this rank becomes `into[i][rank]` of the peer.

    Attributes:
        channel: Channel that carries the tensors.
        parts: Tensors to send, [peers, ...] each.
        into: Contiguous tensors to fill, [peers, ...] each.
        links: Link class to each peer.
        envelope: Envelope of the messages on the CPU.
        label: Text that names the exchange in errors.
    """

    channel: Channel
    parts: Tensors
    into: Tensors
    links: Sequence[str]
    envelope: Envelope
    label: object


class Pending(Protocol):
    """A started exchange.

    `wait` returns when all tensors were received and all sent tensors may be overwritten. With
    NCCL, `wait` does not block the host. Instead, later operations of the current stream wait for
    the exchange on the device.
    """

    def wait(self) -> None: ...


@dataclass
class Counters:
    """Payload bytes that one rank sent, by link class."""

    intra: int = 0
    inter: int = 0

    def add(self, link: str, size: int) -> None:
        """Count `size` bytes over a link of class `link`, "intra" or "inter"."""
        if link == "intra":
            self.intra += size
        else:
            self.inter += size

    def reset(self) -> None:
        self.intra = self.inter = 0


class Endpoint(Protocol):
    """Interface by which one rank sends and receives tensors.

    `rank` and peers are indices in the ring, ulysses group or grid. `exchange` starts transfers and
    does not block. Errors contain `str(label)`. `all_to_all` returns when all tensors were
    received. `released` declares that this rank does not read the tensors again before they are
    overwritten. `relays` returns the relay stream for one pass.
    """

    rank: int
    counters: Counters
    room: int  # minimum bytes of a receive buffer on the CPU

    def exchange(
        self, channel: Channel, sends: Sequence[Send], receives: Sequence[Receive], label: object
    ) -> Pending: ...

    def all_to_all(self, trade: AllToAll) -> None: ...

    def released(self, tensors: Tensors) -> None: ...

    def relays(self, device: torch.device) -> Relays: ...


def exchanged(
    endpoint: Endpoint,
    channel: Channel,
    sends: Iterable[Send],
    expected: Mapping[int, Shapes],
    device: torch.device,
    envelope: Envelope,
    label: object,
) -> dict[int, Tensors]:
    """Send and receive tensors, and wait; return the received tensors by peer.

    Args:
        endpoint: Endpoint of this rank.
        channel: Channel that carries the tensors.
        sends: Tensors to send; they need not be contiguous.
        expected: Shapes and dtypes to receive, by peer.
        device: Device of the tensors.
        envelope: Envelope of all messages.
        label: Text that names the exchange in errors.

    Returns:
        Received tensors by peer. On the CPU, all tensors from one peer were one message.
    """
    packed = device.type == "cpu"
    sent, received = [], []
    for peer, link, tensors, _ in sends:
        if packed:
            message = packing.pack(tensors, envelope)
            sent.append(Send(peer, link, message.tensors, message.flat))
        else:
            sent.append(Send(peer, link, [t.contiguous() for t in tensors]))
    for peer, shapes in expected.items():
        if packed:
            room = packing.empty(shapes, device, endpoint.room)
            received.append(Receive(peer, room.tensors, room, envelope))
        else:
            fresh = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]
            received.append(Receive(peer, fresh))
    if sent or received:
        endpoint.exchange(channel, sent, received, label).wait()
    return {receive.peer: receive.tensors for receive in received}


def all_to_all_by_messages(endpoint: Endpoint, trade: AllToAll) -> None:
    """Run an all-to-all as one exchange, with one message to and from every other rank."""
    channel, parts, into, links, envelope, label = trade
    me, device = endpoint.rank, into[0].device
    peers = [peer for peer in range(len(links)) if peer != me]
    sends = [Send(peer, links[peer], [part[peer] for part in parts]) for peer in peers]
    shapes = [(t.shape[1:], t.dtype) for t in into]
    expected = dict.fromkeys(peers, shapes)
    arrived = exchanged(endpoint, channel, sends, expected, device, envelope, label)
    for peer, tensors in (*arrived.items(), (me, [part[me] for part in parts])):
        for target, tensor in zip(into, tensors, strict=True):
            target[peer].copy_(tensor)


@dataclass
class _PendingWorks:
    """Pending operations (`Work`) of torch.distributed, with the data for error messages.

    `is_completed` is not used, because it may stay False forever with gloo.
    """

    works: list[dist.Work]
    ops: Sequence[dist.P2POp]
    receives: Sequence[Receive]  # their envelopes are checked
    label: object

    def wait(self) -> None:
        for number, work in enumerate(self.works):
            try:
                work.wait()
            except RuntimeError as error:
                # NCCL returns one `Work` for all operations of a batch.
                ops = self.ops if len(self.works) != len(self.ops) else [self.ops[number]]
                raise _exchange_error(self.label, f"{_operations(ops)}: {error}") from error
        for receive in self.receives:
            if receive.message is None or receive.message.flat is None:
                continue
            complaint = packing.mismatch(receive.message.flat, receive.envelope)
            if complaint:
                raise _exchange_error(
                    self.label, f"from member {receive.peer} of the group: {complaint}"
                )


@dataclass
class ProcessEndpoint:
    """Endpoint that uses torch.distributed.

    Attributes:
        rank: Index of this rank among `ranks`.
        ranks: Global rank of each index.
        channels: Process group by (channel, device type).
        counters: Counters of sent bytes.
        room: Minimum size in bytes of a receive buffer on the CPU.
        clock: Clock that measures waits, or None.
        streams: Relay stream of each CUDA device, made at its first use.
    """

    rank: int
    ranks: Sequence[int]
    channels: Mapping[tuple[Channel, str], dist.ProcessGroup]
    counters: Counters = field(default_factory=Counters)
    room: int = 0
    clock: WaitClock | None = None
    streams: dict[torch.device, torch.cuda.Stream] = field(default_factory=dict)

    def exchange(
        self, channel: Channel, sends: Sequence[Send], receives: Sequence[Receive], label: object
    ) -> Pending:
        example = (sends[0] if sends else receives[0]).tensors[0]
        group, ops = self.channels[channel, example.device.type], []
        for receive in receives:
            buffers, message, peer = receive.tensors, receive.message, self.ranks[receive.peer]
            if message is not None and message.flat is not None:
                buffers = [message.flat]
                if example.is_cpu and message.room is not None:  # a wrong message may be longer
                    message.flat[-packing.ENVELOPE :] = 0  # erase the envelope of an old message
                    buffers = [message.room]
            for buffer in buffers:
                ops.append(dist.P2POp(dist.irecv, buffer, peer, group))
        for send in sends:
            peer = self.ranks[send.peer]
            for tensor in send.tensors if send.flat is None else (send.flat,):
                ops.append(dist.P2POp(dist.isend, tensor, peer, group))
            self.counters.add(send.link, sum([t.nbytes for t in send.tensors]))
        try:
            works = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            raise _exchange_error(label, f"{_operations(ops)}: {error}") from error
        started = _PendingWorks(works, ops, receives if example.is_cpu else (), label)
        return started if self.clock is None else self.clock.timed(started, example.is_cpu)

    def all_to_all(self, trade: AllToAll) -> None:
        """Run an all-to-all by collectives on CUDA if ranks are in order, else by messages."""
        example = trade.into[0]
        group = self.channels[trade.channel, example.device.type]
        # A collective uses the rank order of the process group, which is sorted.
        if example.is_cpu or dist.get_process_group_ranks(group) != list(self.ranks):
            all_to_all_by_messages(self, trade)
        else:
            self._collectives(group, trade)

    def _collectives(self, group: dist.ProcessGroup, trade: AllToAll) -> None:
        """Run one all-to-all collective per tensor."""
        works, label = [], trade.label
        size = sum([part.nbytes for part in trade.parts]) // len(trade.links)
        for peer, link in enumerate(trade.links):
            if peer != self.rank:
                self.counters.add(link, size)
        try:
            for target, part in zip(trade.into, trade.parts, strict=True):
                source = part.contiguous()
                works.append(dist.all_to_all_single(target, source, group=group, async_op=True))
        except RuntimeError as error:
            raise _exchange_error(label, f"{_operations(())}: {error}") from error
        started = _PendingWorks(works, (), (), label)
        (started if self.clock is None else self.clock.timed(started, False)).wait()

    def released(self, tensors: Tensors) -> None:
        pass

    def relays(self, device: torch.device) -> Relays:
        if device.type != "cuda":
            return InOrder()
        if device not in self.streams:
            # High priority: sums of partial results start beside an attention kernel.
            self.streams[device] = torch.cuda.Stream(device, priority=-1)
        return StreamRelays(self.streams[device], self.clock)


def _operations(ops: Sequence[dist.P2POp]) -> str:
    """Return a description of operations for an error; an empty sequence means a collective."""
    return (
        ", ".join(
            f"{'receiving from' if op.op is dist.irecv else 'sending to'} rank {op.peer}"
            for op in ops
        )
        or "all-to-all"
    )


def _exchange_error(label: object, reason: str) -> RuntimeError:
    return RuntimeError(f"exchange failed: {label}: {reason}")

"""Moving tensors between the ranks of a grid, and counting what moved.

Two transports behind one small protocol (`Endpoint`): torch.distributed process groups, one
per ring and kind of traffic (activations and gradients on one communicator give wrong results,
BurstEngine section 3.1), and an in-process one, where one process holds every rank of the
grid. This module decides what an exchange is and what its failure says. It must not know what
the tensors mean, who computes what when, nor how groups are made (`groups` does).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from . import packing
from .packing import UNSTAMPED, Parcel, Seal

Tensors = Sequence[torch.Tensor]


class Channel(NamedTuple):
    """A ring ("flat", "intra", "inter") or "ulysses", and whether it carries gradients."""

    ring: str
    gradient: bool


class Send(NamedTuple):
    """Contiguous tensors for member `peer` of the ring, over `link` ("intra" or "inter").

    flat: the buffer of a sealed parcel that holds all of them, to be sent as one message.
    """

    peer: int
    link: str
    tensors: Tensors
    flat: torch.Tensor | None = None


class Receive(NamedTuple):
    """Contiguous tensors to be filled from member `peer` of the ring.

    parcel: what holds them, to be received as one message; seal: what it must bear.
    """

    peer: int
    tensors: Tensors
    parcel: Parcel | None = None
    seal: Seal = Seal(UNSTAMPED, 0)


class Pending(Protocol):
    """A started exchange: `wait` returns when all it sends may be reused and all arrived."""

    def wait(self) -> None: ...


@dataclass
class Counters:
    """Payload bytes sent by one rank, by link class."""

    intra: int = 0
    inter: int = 0

    def add(self, sends: Iterable[Send]) -> None:
        for send in sends:
            size = sum(t.numel() * t.element_size() for t in send.tensors)
            setattr(self, send.link, getattr(self, send.link) + size)

    def reset(self) -> None:
        self.intra = self.inter = 0


class Endpoint(Protocol):
    """One rank's end of a transport; `rank` and peers count from 0 in its ring (or ulysses group).

    `exchange` starts transfers and does not block.
    """

    rank: int
    counters: Counters
    room: int  # bytes that a receive buffer on the CPU has at least

    def exchange(
        self, channel: Channel, sends: Sequence[Send], receives: Sequence[Receive], label: str
    ) -> Pending: ...


# --- torch.distributed ---------------------------------------------------------------------


@dataclass
class _Works:
    """Only `wait` tells: with gloo `is_completed` may stay False for good."""

    works: list[dist.Work]
    words: Sequence[str]  # what each work does, "receiving from rank 3"
    receives: Sequence[Receive]
    label: str

    def wait(self) -> None:
        for work, words in zip(self.works, self.words, strict=True):
            try:
                work.wait()
            except RuntimeError as error:
                raise _failed(self.label, f"{words}: {error}") from error
        for receive in self.receives:
            if receive.parcel is None or receive.parcel.flat is None:
                continue
            complaint = packing.broken(receive.parcel.flat, receive.seal)
            if complaint:
                raise _failed(self.label, f"from member {receive.peer} of the ring: {complaint}")


@dataclass
class ProcessEndpoint:
    """An end of the torch.distributed transport."""

    rank: int
    ranks: Sequence[int]  # peer -> global rank
    channels: dict[Channel, dist.ProcessGroup]
    counters: Counters = field(default_factory=Counters)
    room: int = 0

    def exchange(
        self, channel: Channel, sends: Sequence[Send], receives: Sequence[Receive], label: str
    ) -> Pending:
        group = self.channels[channel]
        ops, words = [], []
        for call, does, messages in (
            (dist.irecv, "receiving from", [(m.peer, *_buffers(m)) for m in receives]),
            (dist.isend, "sending to", [(m.peer, *_message(m)) for m in sends]),
        ):
            for member, *tensors in messages:
                peer = self.ranks[member]
                for tensor in tensors:
                    ops.append(dist.P2POp(call, tensor, peer, group))
                    words.append(f"{does} rank {peer}")
        self.counters.add(sends)
        try:
            works = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            raise _failed(label, f"{', '.join(words)}: {error}") from error
        if len(works) != len(ops):  # NCCL makes one work of all
            words = [", ".join(words)] * len(works)
        return _Works(works, words, receives, label)


def _message(send: Send) -> Tensors:
    """What torch is asked to send."""
    return send.tensors if send.flat is None else [send.flat]


def _buffers(receive: Receive) -> Tensors:
    """What torch is asked to fill; without an old seal in it."""
    parcel = receive.parcel
    if parcel is None or parcel.flat is None or parcel.room is None:
        return receive.tensors
    packing.unseal_(parcel.flat)
    return [parcel.room]


def _failed(label: str, reason: str) -> RuntimeError:
    return RuntimeError(f"exchange failed: {label}: {reason}")


# --- in one process ------------------------------------------------------------------------


@dataclass
class Mail:
    """One message from rank to rank; whoever posts first creates it, the other completes it."""

    label: str
    source: Tensors | None = None
    target: Tensors | None = None
    versions: list[int] = field(default_factory=list)
    delivered: bool = False

    def deliver(self) -> None:
        """Copy, late on purpose: what was overwritten in flight shows in its version counter."""
        if self.delivered:
            return
        if self.source is None or self.target is None:
            raise RuntimeError(f"deadlock: exchange has only one end: {self.label}")
        if _versions(self.source) != self.versions:
            raise RuntimeError(f"overwritten while in flight: {self.label}")
        for target, source in zip(self.target, self.source, strict=True):
            if target.shape != source.shape or target.dtype != source.dtype:
                raise RuntimeError(f"sent {source.shape} into {target.shape}: {self.label}")
            target.copy_(source)
        self.delivered = True


@dataclass
class _Delivery:
    mails: list[Mail]

    def wait(self) -> None:
        for mail in self.mails:
            mail.deliver()


@dataclass
class LocalEndpoint:
    """An end of the in-process transport; all ranks share `boxes` (sender, receiver -> mail)."""

    rank: int
    ranks: Sequence[int]  # peer -> rank in the grid
    boxes: dict[tuple[Channel, int, int], deque[Mail]]
    counters: Counters = field(default_factory=Counters)
    room: int = 0

    def exchange(
        self, channel: Channel, sends: Sequence[Send], receives: Sequence[Receive], label: str
    ) -> Pending:
        mails = []
        for send in sends:
            mail = self._mail(
                (channel, self.ranks[self.rank], self.ranks[send.peer]), "source", label
            )
            mail.source, mail.versions = send.tensors, _versions(send.tensors)
            mails.append(mail)
        for receive in receives:
            mail = self._mail(
                (channel, self.ranks[receive.peer], self.ranks[self.rank]), "target", label
            )
            mail.target = receive.tensors
            mails.append(mail)
        self.counters.add(sends)
        return _Delivery(mails)

    def _mail(self, key: tuple[Channel, int, int], end: str, label: str) -> Mail:
        """The oldest mail of this box that lacks `end`, or a new one."""
        box = self.boxes.setdefault(key, deque())
        if box and getattr(box[0], end) is None:
            return box.popleft()
        box.append(Mail(label))
        return box[-1]


def _versions(tensors: Tensors) -> list[int]:
    """How often each was written to; tensors of inference mode do not count."""
    return [0 if t.is_inference() else t._version for t in tensors]

"""Runs a table of hops on one rank: the states that enter its pieces, and those that leave.

Decides that a round is one exchange, so that what NCCL runs is one batch on every rank, and that an
initial state is known to the rank of the piece it enters alone: in the map of that piece, others
see it without one.

Shape letters: p pieces of this rank, b batch, h heads, d rows (keys), w columns (values).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from zlib import crc32

import torch

from ..comm import packing
from ..comm.groups import Groups
from ..comm.packing import CallTag, Envelope, Message
from ..comm.rows import GRID
from ..comm.transport import Receive, Send
from .known import Known
from .maps import Map
from .program import Parcel, Program, States

Initial = Mapping[int, torch.Tensor]  # document -> [b, h, d, w]; zero for others


class Scanned(NamedTuple):
    """entering [p, b, h, d, w]; leaving: document -> the state after its last piece, where that
    is this rank's."""

    entering: torch.Tensor
    leaving: dict[int, torch.Tensor]


@dataclass(frozen=True)
class Scan:
    """One direction of a scan, on one rank. name: of the direction, for messages of errors."""

    groups: Groups
    program: Program
    states: States
    device: torch.device
    name: str

    def run(self, call: CallTag, maps: Map, initial: Initial, leaving: bool) -> Scanned:
        """Carry the states along. maps: of this rank's pieces, with p; leaving: are the states
        after the last pieces wanted?"""
        program = self.program
        known = Known(program.begins, program.blocks, self._own(maps, initial))
        for number, sends, receives in program.rounds:
            envelope = Envelope(call, crc32(f"{self.name} {number}".encode()))
            self._exchange(known, sends, receives, envelope, f"round {number} of {self.name}")
        entering, left = maps.increment.new_zeros(maps.increment.shape), {}
        for index, piece in enumerate(program.own):
            document, ends = program.document[index], leaving and program.ends[piece]
            if program.begins[piece]:
                state = None
                if document in initial:
                    entering[index] = initial[document]
            else:
                every = range(program.blocks.number)
                state = known.whole([known.state(piece, block) for block in every])
                entering[index] = state
            if ends:
                left[document] = self._own_map(maps, initial, index)(state)
        return Scanned(entering, left)

    def _own(self, maps: Map, initial: Initial) -> dict[int, Map]:
        own = enumerate(self.program.own)
        return {piece: self._own_map(maps, initial, index) for index, piece in own}

    def _own_map(self, maps: Map, initial: Initial, index: int) -> Map:
        """That of a piece; where its document begins, from zero."""
        program, transition = self.program, maps.transition
        found = Map(None if transition is None else transition[index], maps.increment[index])
        document = program.document[index]
        if program.begins[program.own[index]] and document in initial:
            found = found._replace(increment=found(initial[document]))
        return found

    def _exchange(
        self,
        known: Known,
        sends: Sequence[Parcel],
        receives: Sequence[Parcel],
        envelope: Envelope,
        label: str,
    ) -> None:
        contents = [[t for hop in parcel.hops for t in known.content(hop)] for parcel in sends]
        shapes = [[s for hop in parcel.hops for s in self.program.shapes(hop, self.states)]
                  for parcel in receives]  # fmt: skip
        peers = [parcel.peer for parcel in sends], [parcel.peer for parcel in receives]
        what = self.states.dtype, self.device
        arrived = exchange(self.groups, peers, contents, shapes, what, envelope, label)
        for parcel, tensors in zip(receives, arrived, strict=True):
            rest = iter(tensors)
            for hop in parcel.hops:
                known.learn(hop, [next(rest) for _ in self.program.shapes(hop, self.states)])


def exchange(
    groups: Groups,
    peers: tuple[Sequence[int], Sequence[int]],
    contents: Sequence[Sequence[torch.Tensor]],
    shapes: Sequence[Sequence[torch.Size]],
    what: tuple[torch.dtype, torch.device],
    envelope: Envelope,
    label: str,
) -> list[Sequence[torch.Tensor]]:
    """What arrived: tensors of `shapes` from each of the second peers, while `contents` went to
    each of the first; all of one dtype on one device."""
    dtype, device = what
    packed = device.type == "cpu"
    sent, received = [], []
    for peer, tensors in zip(peers[0], contents, strict=True):
        own = tuple(t.contiguous() for t in tensors)
        message = packing.pack(own, envelope) if packed else Message(None, own)
        link = groups.topology.link(groups.rank, peer)
        sent.append(Send(peer, link, message.tensors, message.flat))
    for peer, wanted in zip(peers[1], shapes, strict=True):
        if packed:
            room = packing.empty([(s, dtype) for s in wanted], device, groups.grid.room)
            received.append(Receive(peer, room.tensors, room, envelope))
        else:
            fresh = [torch.empty(s, dtype=dtype, device=device) for s in wanted]
            received.append(Receive(peer, fresh, None, envelope))
    if sent or received:
        groups.grid.exchange(GRID, sent, received, label).wait()
    return [receive.tensors for receive in received]

"""Final states: from the rank of a document's last piece to all ranks, and their gradients back.

Decides that one exchange does it, with one message to each rank; that a document without positions
hands its initial state on, on every rank for itself; and that gradients of all ranks add up, in the
order of the ranks, where the last piece is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

import torch

from ..comm.groups import Groups
from ..comm.packing import CallTag, Envelope
from .executor import exchange
from .program import States


@dataclass(frozen=True)
class Finals:
    """holders: document -> the rank of its last piece; None for one that is empty."""

    groups: Groups
    holders: tuple[int | None, ...]
    states: States
    device: torch.device

    def held_by(self, rank: int) -> list[int]:
        """The documents that end on a rank."""
        return [document for document, holder in enumerate(self.holders) if holder == rank]

    @property
    def message(self) -> int:
        """The bytes of the longest message."""
        most = max(map(len, map(self.held_by, range(self.groups.size))))
        return most * self.shape.numel() * self.states.dtype.itemsize

    @property
    def shape(self) -> torch.Size:
        """Of a state."""
        return torch.Size((self.states.batch, *self.states.sizes))

    def spread(
        self, call: CallTag, left: Mapping[int, torch.Tensor], initial: torch.Tensor | None
    ) -> torch.Tensor:
        """[documents, b, h, d, w] on every rank. left: document -> the state after its last piece,
        of this rank's; initial [documents, b, h, d, w] or None for zeros."""
        me, size = self.groups.rank, self.groups.size
        final = torch.zeros(
            (len(self.holders), *self.shape), dtype=self.states.dtype, device=self.device
        )
        mine = self.held_by(me)
        others = [rank for rank in range(size) if rank != me]
        peers = others if mine else [], [rank for rank in others if self.held_by(rank)]
        came = self._exchange(
            call, "final states", peers, [[left[d] for d in mine]] * len(peers[0]),
            [len(self.held_by(rank)) for rank in peers[1]],
        )  # fmt: skip
        for document in mine:
            final[document] = left[document]
        for rank, states in zip(peers[1], came, strict=True):
            for document, state in zip(self.held_by(rank), states, strict=True):
                final[document] = state
        if initial is not None:
            for document in self.empty:
                final[document] = initial[document]
        return final

    @property
    def empty(self) -> list[int]:
        """Documents without positions."""
        return [document for document, holder in enumerate(self.holders) if holder is None]

    def collect(self, call: CallTag, gradient: torch.Tensor) -> dict[int, torch.Tensor]:
        """Document -> the sum over all ranks of the gradient of its final state, of those that end
        here. gradient [documents, b, h, d, w]: this rank's."""
        me, size = self.groups.rank, self.groups.size
        gradient = gradient.to(self.states.dtype)
        mine = self.held_by(me)
        others = [rank for rank in range(size) if rank != me]
        peers = [rank for rank in others if self.held_by(rank)], others if mine else []
        contents = [[gradient[d] for d in self.held_by(rank)] for rank in peers[0]]
        name = "gradients of final states"
        came = self._exchange(call, name, peers, contents, [len(mine)] * len(peers[1]))
        given = dict(zip(peers[1], came, strict=True)) | {me: [gradient[d] for d in mine]}
        each = [given[rank] for rank in sorted(given)]
        return {d: torch.stack([some[i] for some in each]).sum(0) for i, d in enumerate(mine)}

    def _exchange(
        self,
        call: CallTag,
        name: str,
        peers: tuple[Sequence[int], Sequence[int]],
        contents: Sequence[Sequence[torch.Tensor]],
        counts: Sequence[int],
    ) -> list[Sequence[torch.Tensor]]:
        """`counts` states from each of the second peers."""
        what = self.states.dtype, self.device
        envelope = Envelope(call, crc32(name.encode()))
        shapes = [[self.shape] * count for count in counts]
        return exchange(self.groups, peers, contents, shapes, what, envelope, name)

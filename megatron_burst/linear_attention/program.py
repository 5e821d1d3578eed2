"""One rank's part of a table of hops, round by round, and how long messages are.

Decides that all hops of a round between two ranks are one message, in the order of the table.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ..layout.chains import Chains
from ..schedule.scans.blocks import Blocks
from ..schedule.scans.hops import MAP, WHOLE, Hops
from ..schedule.scans.sizes import Form, Sizes
from .maps import shape_of


class Hop(NamedTuple):
    """As of `Hops`: the state that enters piece `first`, or the map of `first` to `last`."""

    kind: int
    first: int
    last: int
    block: int


class Parcel(NamedTuple):
    """What goes to, or comes from, one rank in a round: one message."""

    peer: int
    hops: tuple[Hop, ...]


class Round(NamedTuple):
    """What one rank sends and receives at once, in round `number` of the table."""

    number: int
    sends: tuple[Parcel, ...]
    receives: tuple[Parcel, ...]


class States(NamedTuple):
    """What travels: states [batch, *sizes], sizes (h, d, w), in `dtype`, and maps of them whose
    transitions have this form, see `maps.FORMS`."""

    batch: int
    sizes: tuple[int, int, int]
    form: Form
    dtype: torch.dtype

    @property
    def bytes(self) -> Sizes:
        """What they cost."""
        return Sizes(self.batch, *self.sizes, self.form, self.dtype.itemsize)


class Program(NamedTuple):
    """What one rank runs of a table. own: its pieces, in the order of its rows; begins, ends: of
    all pieces; document: of its own."""

    rounds: tuple[Round, ...]
    own: tuple[int, ...]
    begins: list[bool]
    ends: list[bool]
    document: tuple[int, ...]
    blocks: Blocks

    def shapes(self, hop: Hop, states: States) -> list[torch.Size]:
        """Of what a hop carries, in order: the transition, if maps have one, and the state."""
        heads, rows, columns = self.blocks.sizes if hop.block == WHOLE else self.blocks.shape
        found = [torch.Size((states.batch, heads, rows, columns))]
        transition = shape_of(states.form, states.batch, (heads, rows, columns))
        if hop.kind == MAP and transition is not None:
            found.insert(0, torch.Size(transition))
        return found


def program(hops: Hops, chains: Chains, rank: int, blocks: Blocks) -> Program:
    """The part of `rank`."""
    mine = np.flatnonzero((hops.source == rank) | (hops.destination == rank))
    found: dict[int, tuple[dict[int, list[Hop]], dict[int, list[Hop]]]] = {}
    for row in zip(*(column[mine].tolist() for column in hops), strict=True):
        number, source, destination, *hop = row
        sends, receives = found.setdefault(number, ({}, {}))
        way, peer = (sends, destination) if source == rank else (receives, source)
        way.setdefault(peer, []).append(Hop(*hop))
    rounds = tuple(
        Round(number, *(_parcels(way) for way in ways)) for number, ways in found.items()
    )
    own = chains.of(rank)
    return Program(
        rounds, tuple(own.tolist()), chains.begins.tolist(), chains.ends.tolist(),
        tuple(chains.document[own].tolist()), blocks,
    )  # fmt: skip


def _parcels(way: dict[int, list[Hop]]) -> tuple[Parcel, ...]:
    return tuple(Parcel(peer, tuple(some)) for peer, some in way.items())


def longest_message(hops: Hops, blocks: Blocks, states: States) -> tuple[int, int]:
    """The bytes of the longest message of a table, and how many tensors one has at most."""
    if not len(hops):
        return 0, 0
    key = np.stack([hops.round, hops.source, hops.destination])
    message = np.unique(key, axis=1, return_inverse=True)[1].reshape(-1)
    total = np.bincount(message, weights=states.bytes.of(hops, blocks.number))
    return int(total.max()), 2 * int(np.bincount(message).max())

# SPDX-License-Identifier: Apache-2.0
"""The order in which the simulator sends the messages of a schedule: exchanges, then waves.

An exchange consists of the messages that start and land together. A wave consists of messages of
one exchange that have no sender and no receiver in common. Waves follow one another; messages to
the nearest rank are in the first wave. So two ranks do not both wait for a third rank while other
ranks are free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..schedule.tables import Grid, Transfers
from .places import RankPlaces


@dataclass(frozen=True)
class Wires:
    """Properties of the links between ranks.

    Attributes:
        pairs: True if any two ranks of a node have their own link. If False, and always between
            nodes, all messages of a rank in one direction share one port.
        places: Node and NIC of each rank. None if ranks are on the nodes of the grid and every rank
            has its own NIC.
        together: True if messages that a rank starts at one boundary share its port and end
            together, as TCP streams do. If False, they follow one another.
    """

    pairs: bool = False
    places: RankPlaces | None = None
    together: bool = False

    def between(self, transfers: Transfers, grid: Grid) -> np.ndarray:
        """Return a bool array that is true for transfers between nodes."""
        return transfers.between(grid) if self.places is None else self.places.between(transfers)


ONE_NIC = Wires()


class Wave(NamedTuple):
    """Messages of one exchange that have no sender and no receiver in common.

    Attributes:
        clocks: [4, n], indices in `_Clocks.free` of sender, receiver, sender's port and receiver's
            port of each message.
        ends: [2, n], indices of sender and receiver in argument `done` of `_Clocks.send`.
        rows: Indices of the messages in the schedule's transfers.
    """

    clocks: np.ndarray
    ends: np.ndarray
    rows: np.ndarray


class TimedExchange(NamedTuple):
    """Messages of all ranks that start and land together on one communicator.

    Attributes:
        waves: The messages, wave by wave.
        ranks: Ranks that take part: all senders and receivers, so a rank may be listed twice.
        land: Landing boundary of the messages.
    """

    waves: Sequence[Wave]
    ranks: np.ndarray
    land: int


def ports_of(transfers: Transfers, grid: Grid, wires: Wires) -> np.ndarray:
    """Return the sender's port and the receiver's port of each message, int64 [2, n]."""
    size, between = grid.size, wires.between(transfers, grid)
    leaves, arrives = between * size + transfers.src, (2 + between) * size + transfers.dst
    if wires.pairs:
        own = 4 * size + transfers.src.astype(np.int64) * size + transfers.dst
        leaves, arrives = (np.where(between, port, own) for port in (leaves, arrives))
    return np.stack([leaves, arrives]).astype(np.int64)


def exchanges(
    transfers: Transfers, grid: Grid, ports: np.ndarray
) -> dict[int, list[TimedExchange]]:
    """Return, for each boundary, the exchanges that start there, in order."""
    starting: dict[int, list[TimedExchange]] = {}
    if not len(transfers.src):
        return starting
    keys = np.stack([transfers.post, transfers.ring, transfers.accumulated, transfers.land])
    order, exchange = _grouped(keys)
    wave = _waves(transfers.where(order), exchange, grid)
    by_wave = np.lexsort((wave, exchange))
    order, exchange, wave = order[by_wave], exchange[by_wave], wave[by_wave]
    src, dst = transfers.src[order], transfers.dst[order]
    clocks = np.concatenate([[src, dst], grid.size + ports[:, order]])
    ends = np.stack([src, grid.size + dst])
    post, land = transfers.post[order], transfers.land[order]
    edges = _edges(exchange, wave)
    waves = [Wave(clocks[:, i:j], ends[:, i:j], order[i:j]) for i, j in pairwise(edges)]
    bounds = _edges(exchange)
    first = np.searchsorted(edges, bounds).tolist()
    for index, (i, j) in enumerate(pairwise(bounds)):
        exchange_waves = waves[first[index] : first[index + 1]]
        ranks = clocks[:2, i:j].reshape(-1)
        starting.setdefault(int(post[i]), []).append(
            TimedExchange(exchange_waves, ranks, int(land[i]))
        )
    return starting


def _waves(transfers: Transfers, exchange: np.ndarray, grid: Grid) -> np.ndarray:
    """Return the wave number of each message; messages are sorted by exchange.

    All messages are in one wave if no two have a sender or a receiver in common. Otherwise the wave
    depends on the distance between sender and receiver, and messages between the same two ranks
    stay in the order of the table.
    """
    clash = np.zeros(int(exchange[-1]) + 1, dtype=bool)
    for end in (transfers.src, transfers.dst):
        ends = np.sort(exchange * grid.size + end)
        clash[ends[1:][ends[1:] == ends[:-1]] // grid.size] = True
    if not clash.any():
        return np.zeros_like(exchange)
    src, dst = transfers.src.astype(np.int64), transfers.dst.astype(np.int64)
    between = transfers.between(grid)
    # The distance is counted within the node, or over all ranks. Messages with one distance have no
    # sender and no receiver in common.
    away = np.where(between, grid.intra + (dst - src) % grid.size, (dst - src) % grid.intra)
    away *= clash[exchange]
    order, group = _grouped(np.stack([exchange, src, dst]))
    start = np.searchsorted(group, group)
    repeat = np.empty_like(order)
    repeat[order] = np.arange(len(order)) - start
    return repeat * (grid.intra + grid.size) + away


def _grouped(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sort the columns of `keys`; return the order, and the group number of each sorted column."""
    order = np.lexsort(keys[::-1])
    new = (np.diff(keys[:, order], axis=1) != 0).any(axis=0)
    return order, np.concatenate([[0], np.cumsum(new)])


def _edges(*keys: np.ndarray) -> list[int]:
    """Return the bounds of runs of equal keys: 0, each index with a new key, number of entries."""
    new = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
    return [0, *(np.flatnonzero(new) + 1).tolist(), len(keys[0])]

# SPDX-License-Identifier: Apache-2.0
"""The messages of a schedule as the simulator sends them: exchange by exchange, wave by wave.

Messages of one exchange that have a sender or a receiver in common follow one another. Decides in
which order: to the nearest rank first, so that no two ranks wait for a third at the same time while
others could serve them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..schedule.tables import Grid, Transfers
from .places import Places


@dataclass(frozen=True)
class Wires:
    """How ranks are connected.

    pairs: within a node any two ranks have a link of their own; otherwise, and between nodes, a
    rank has one port. places: which node and NIC each rank has; None: nodes are those of the grid,
    and every rank has a NIC of its own. together: messages that a rank starts at one boundary share
    its ports and end together, as streams of TCP do; otherwise they follow one another.
    """

    pairs: bool = False
    places: Places | None = None
    together: bool = False

    def between(self, moved: Transfers, grid: Grid) -> np.ndarray:
        """Which transfers cross between nodes?"""
        return moved.between(grid) if self.places is None else self.places.between(moved)


ONE_NIC = Wires()


class Wave(NamedTuple):
    """Messages of one exchange of which no two have the same sender or the same receiver.

    clocks: [4, n], of each its sender, its receiver and their ports, as indices of `_Clocks.free`;
    ends: [2, n], its sender and its receiver, as of `done` of `_Clocks.send`; which: its row of the
    schedule's transfers.
    """

    clocks: np.ndarray
    ends: np.ndarray
    which: np.ndarray


class TimedExchange(NamedTuple):
    """Messages of all ranks that start and land together on one communicator.

    ranks: which take part, some of them twice.
    """

    waves: Sequence[Wave]
    ranks: np.ndarray
    land: int


def ports_of(moved: Transfers, grid: Grid, wires: Wires) -> np.ndarray:
    """Int [2, n]: the port from which each message leaves, and the one at which it arrives."""
    size, between = grid.size, wires.between(moved, grid)
    leaves, arrives = between * size + moved.src, (2 + between) * size + moved.dst
    if wires.pairs:
        own = 4 * size + moved.src.astype(np.int64) * size + moved.dst
        leaves, arrives = (np.where(between, port, own) for port in (leaves, arrives))
    return np.stack([leaves, arrives]).astype(np.int64)


def exchanges(moved: Transfers, grid: Grid, ports: np.ndarray) -> dict[int, list[TimedExchange]]:
    """Boundary -> the exchanges that start there, in the order in which ranks start them."""
    starting: dict[int, list[TimedExchange]] = {}
    if not len(moved.src):
        return starting
    keys = np.stack([moved.post, moved.ring, moved.accumulated, moved.land])
    order, exchange = _grouped(keys)
    wave = _waves(moved.where(order), exchange, grid)
    again = np.lexsort((wave, exchange))
    order, exchange, wave = order[again], exchange[again], wave[again]
    src, dst = moved.src[order], moved.dst[order]
    clocks = np.concatenate([[src, dst], grid.size + ports[:, order]])
    ends = np.stack([src, grid.size + dst])
    post, land = moved.post[order], moved.land[order]
    edges = _edges(exchange, wave)
    waves = [Wave(clocks[:, i:j], ends[:, i:j], order[i:j]) for i, j in pairwise(edges)]
    bounds = _edges(exchange)
    first = np.searchsorted(edges, bounds).tolist()
    for index, (i, j) in enumerate(pairwise(bounds)):
        some = waves[first[index] : first[index + 1]]
        ranks = clocks[:2, i:j].reshape(-1)
        starting.setdefault(int(post[i]), []).append(TimedExchange(some, ranks, int(land[i])))
    return starting


def _waves(moved: Transfers, exchange: np.ndarray, grid: Grid) -> np.ndarray:
    """Which wave of its exchange each message belongs to, in columns by exchange.

    All in one where that can be. Else by how far they go, and two of the same two ranks in the
    order of the table.
    """
    clash = np.zeros(int(exchange[-1]) + 1, dtype=bool)
    for end in (moved.src, moved.dst):
        _, index, times = np.unique(
            exchange * grid.size + end, return_inverse=True, return_counts=True
        )
        clash[exchange[times[index] > 1]] = True
    if not clash.any():
        return np.zeros_like(exchange)
    src, dst = moved.src.astype(np.int64), moved.dst.astype(np.int64)
    between = moved.between(grid)
    # Round the node, or round all ranks: at one distance no two have the same sender or receiver.
    away = np.where(between, grid.intra + (dst - src) % grid.size, (dst - src) % grid.intra)
    away *= clash[exchange]
    order, group = _grouped(np.stack([exchange, src, dst]))
    start = np.searchsorted(group, group)
    repeat = np.empty_like(order)
    repeat[order] = np.arange(len(order)) - start
    return repeat * (grid.intra + grid.size) + away


def _grouped(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The order of the columns of `keys`, equal ones as they were, and which group each is in."""
    order = np.lexsort(keys[::-1])
    new = (np.diff(keys[:, order], axis=1) != 0).any(axis=0)
    return order, np.concatenate([[0], np.cumsum(new)])


def _edges(*keys: np.ndarray) -> list[int]:
    """Where the keys, which are sorted, change; with both ends."""
    new = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
    return [0, *(np.flatnonzero(new) + 1).tolist(), len(keys[0])]

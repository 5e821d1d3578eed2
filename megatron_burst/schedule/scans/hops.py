# SPDX-License-Identifier: Apache-2.0
"""The table of hops of a state scan, over all ranks.

Piece i (a run of consecutive positions of a document on one rank) changes a state S to map_i(S) =
A_i S + B_i. The state that enters a piece is the state after the previous piece. The state that
enters the first piece of a document is the initial state or zero. A hop carries either a state that
enters a piece, or the map of a run of pieces. Algorithms decide only whether a state or a map is
sent, and when. The executor runs the table, `timing` simulates it, and `sizes` counts its bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...layout.pieces import Chains
from ..topology import Topology

STATE, MAP = 0, 1
ALL_BLOCKS = -1


class Hops(NamedTuple):
    """The hops of all ranks: int64 arrays with one entry per hop, sorted by `round`.

    In a round, all ranks send and receive at the same time. They send states and maps that they
    computed or received in earlier rounds.

    Attributes:
        round: Round of the hop, from 0; no round is empty.
        source: Rank that sends.
        destination: Rank that receives.
        kind: STATE for the state that enters piece `first`; MAP for the composed map of pieces
            `first` to `last`, which are of one document.
        first: Index of the first piece.
        last: Index of the last piece.
        block: Index of the block of the state (`blocks.cut`) that is sent. A hop of a map carries
            the part of the map that this block needs. ALL_BLOCKS for the whole state or map.
    """

    round: np.ndarray
    source: np.ndarray
    destination: np.ndarray
    kind: np.ndarray
    first: np.ndarray
    last: np.ndarray
    block: np.ndarray

    def __len__(self) -> int:
        return len(self.round)


class Task(NamedTuple):
    """The input of a scan algorithm.

    Attributes:
        chains: Chains of pieces.
        topology: Placement of the ranks.
        blocks: Number of blocks of a state, for algorithms that send blocks.
    """

    chains: Chains
    topology: Topology
    blocks: int = 1


class PieceRuns(NamedTuple):
    """Runs of consecutive pieces of a document on one rank, as arrays [runs] in order.

    Attributes:
        first: int64, index of the first piece.
        last: int64, index of the last piece.
        rank: int64, rank that holds the run.
        nth: int64, index of the run among the runs of its document.
        follows: bool, true if the document has a later run.
    """

    first: np.ndarray
    last: np.ndarray
    rank: np.ndarray
    nth: np.ndarray
    follows: np.ndarray

    def __len__(self) -> int:
        return len(self.first)

    @property
    def document(self) -> np.ndarray:
        """Index of each run's document among the documents that are not empty, int64 [runs]."""
        return np.cumsum(self.nth == 0) - 1


def runs_of(chains: Chains) -> PieceRuns:
    """Return the runs of pieces: consecutive pieces of a document on one rank.

    A state is sent to another rank only between runs.
    """
    opens = chains.begins | np.append(True, chains.rank[1:] != chains.rank[:-1])
    first = np.flatnonzero(opens)
    count = np.arange(len(first))
    begins = chains.begins[first]
    nth = count - np.maximum.accumulate(np.where(begins, count, 0))
    last = np.append(first[1:], len(chains)) - 1
    return PieceRuns(first, last, chains.rank[first], nth, np.append(~begins[1:], False))


def table(*parts: tuple) -> Hops:
    """Concatenate groups of hops into one table, without hops from a rank to itself.

    Args:
        *parts: Tuples of round, source, destination, kind, first, last and block. The arrays of a
            tuple are broadcast against each other.
    """
    broad = [np.broadcast_arrays(*part) for part in parts]
    columns = [
        np.concatenate([array.ravel() for array in column]) for column in zip(*broad, strict=True)
    ]
    sent = columns[1] != columns[2]
    rounds = columns[0][sent]
    by_round = np.argsort(rounds.astype(np.min_scalar_type(rounds.max(initial=0))), kind="stable")
    order = np.flatnonzero(sent)[by_round]
    columns = [column[order].astype(np.int64, copy=False) for column in columns]
    dense = np.cumsum(np.bincount(columns[0], minlength=1) > 0) - 1
    return Hops(dense[columns[0]], *columns[1:])


def messages_of(hops: Hops) -> tuple[np.ndarray, np.ndarray]:
    """Group the hops of a round between two ranks, which are one message.

    Returns:
        (round, source, destination) of each message as int64 [3, messages], in ascending order; and
        the index of the message of each hop.
    """
    ranks = 1 + max(int(hops.source.max(initial=0)), int(hops.destination.max(initial=0)))
    key = (hops.round * ranks + hops.source) * ranks + hops.destination
    if int(key.max(initial=0)) < 4 * len(key):  # counting is faster than sorting
        exists = np.bincount(key) > 0
        messages, index = np.flatnonzero(exists), (np.cumsum(exists) - 1)[key]
    else:
        messages, index = np.unique(key, return_inverse=True)
    round_and_source, destination = np.divmod(messages, ranks)
    return np.stack([*np.divmod(round_and_source, ranks), destination]), index

# SPDX-License-Identifier: Apache-2.0
"""What an algorithm of the state scan is: a table of hops over all ranks.

A piece i changes a state to map_i(S) = A_i S + B_i; the state that enters it is that which leaves
the piece before it, zero or an initial state where its document begins. A hop carries either a
state that enters a piece or the map of a run of pieces; which it is, and when, is all that
algorithms decide. The executor runs the table, the simulator times it, the byte counter adds it up.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...layout.pieces import Chains
from ..topology import Topology

STATE, MAP = 0, 1
WHOLE = -1


class Hops(NamedTuple):
    """One hop per entry, int64 [hops] each, sorted by `round`; rounds count from 0, none is empty.

    In a round every rank sends and receives at once, and what it sends it has from earlier rounds.
    kind: STATE, that which enters piece `first`; or MAP, that of pieces `first` to `last`, one
    after the other, all of one document. block: which of `blocks` parts of the state, or of the map
    as far as this part needs it; WHOLE for all of it. What the parts are: `blocks.cut`.
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
    """What an algorithm makes its table of.

    blocks: into how many parts states are cut, for algorithms that send them in parts.
    """

    chains: Chains
    topology: Topology
    blocks: int = 1


class PieceRuns(NamedTuple):
    """Consecutive pieces of a document on one rank as one: int64 [runs] each, in order.

    first, last: its pieces; nth: its index among the runs of its document; follows: bool, does
    another run of this document come after it?
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
        """int64 [runs]: a number for each document that has pieces, in order."""
        return np.cumsum(self.nth == 0) - 1


def runs_of(chains: Chains) -> PieceRuns:
    """The runs of pieces between which states change the rank."""
    opens = chains.begins | np.append(True, chains.rank[1:] != chains.rank[:-1])
    first = np.flatnonzero(opens)
    count = np.arange(len(first))
    begins = chains.begins[first]
    nth = count - np.maximum.accumulate(np.where(begins, count, 0))
    last = np.append(first[1:], len(chains)) - 1
    return PieceRuns(first, last, chains.rank[first], nth, np.append(~begins[1:], False))


def table(*parts: tuple) -> Hops:
    """The hops of all parts; of each part (round, source, destination, kind, first, last, block),
    which broadcast together. What a rank would send to itself is left out.
    """
    broad = [np.broadcast_arrays(*part) for part in parts]
    columns = [np.concatenate([x.ravel() for x in column]) for column in zip(*broad, strict=True)]
    some = columns[1] != columns[2]
    rounds = columns[0][some]
    order = np.argsort(rounds.astype(np.min_scalar_type(rounds.max(initial=0))), kind="stable")
    found = np.flatnonzero(some)[order]
    columns = [column[found].astype(np.int64, copy=False) for column in columns]
    dense = np.cumsum(np.bincount(columns[0], minlength=1) > 0) - 1
    return Hops(dense[columns[0]], *columns[1:])

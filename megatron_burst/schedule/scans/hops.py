"""What an algorithm of the state scan is: a table of hops over all ranks.

A piece i changes a state to map_i(S) = A_i S + B_i; the state that enters it is that which leaves
the piece before it, zero or an initial state where its document begins. A hop carries either a
state that enters a piece or the map of a run of pieces; which it is, and when, is all that
algorithms decide. The executor runs the table, the simulator times it, the byte counter adds it up.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...layout.chains import Chains
from ..topology import Topology

STATE, MAP = 0, 1
WHOLE = -1


class Hops(NamedTuple):
    """One hop per entry, int64 [hops] each, sorted by `round`.

    In a round every rank sends and receives at once, and what it sends it has from earlier rounds.
    kind: STATE, that which enters piece `first`; or MAP, that of pieces `first` to `last`, one
    after the other, all of one document. block: which of `blocks` parts of the state; WHOLE for all
    of it. Parts are equal shares of heads, then of columns; see `linear_attention`.
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


def table(rows: list[tuple[int, int, int, int, int, int, int]]) -> Hops:
    """Hops of these (round, source, destination, kind, first, last, block), sorted by round."""
    columns = np.array(rows, dtype=np.int64).reshape(-1, 7)
    columns = columns[np.argsort(columns[:, 0], kind="stable")]
    return Hops(*columns.T)

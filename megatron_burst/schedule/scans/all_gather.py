# SPDX-License-Identifier: Apache-2.0
"""LASP-2 (arXiv 2502.07563): the map of each piece goes to every rank that holds a later one.

Decides the way to other nodes: a map crosses to a node once, to one rank that needs it, which hands
it to the others there in a second round.
"""

from __future__ import annotations

import numpy as np

from ...layout.layouts import counted
from .hops import MAP, STATE, WHOLE, Hops, PieceRuns, Task, runs_of, table


def all_gather(task: Task) -> Hops:
    """At most two rounds, whatever the length of a chain; one where all ranks share a node."""
    runs = runs_of(task.chains)
    run, rank = wanted(runs)
    intra = task.topology.per_node
    run, rank = np.divmod(np.sort(run * task.topology.size + rank), task.topology.size)
    source = runs.rank[run]
    node, home = rank // intra, source // intra
    # Of the ranks of another node that need it, in turn by source, one takes it for all.
    opens = np.append(True, (run[1:] != run[:-1]) | (node[1:] != node[:-1]))[: len(run)]
    begin = np.flatnonzero(opens)
    group = np.cumsum(opens) - 1
    size = np.diff(np.append(begin, len(run)))[group]
    gate = rank[begin[group] + source % intra % size]
    straight = (node == home) | (rank == gate)
    return table(
        carried(runs, run, 1 - straight, np.where(straight, source, gate), rank, WHOLE),
    )


def wanted(runs: PieceRuns) -> tuple[np.ndarray, np.ndarray]:
    """(run, rank): which rank needs the map of which run: those that hold a later one, once."""
    rank, begin, count = _lasts(runs)
    run, rank = counted(begin, count), np.repeat(rank, count)
    others = runs.rank[run] != rank
    return run[others], rank[others]


def count_wanted(runs: PieceRuns) -> int:
    """How many they are at most: ranks that hold a run before the one they need are counted too."""
    return int(_lasts(runs)[2].sum())


def _lasts(runs: PieceRuns) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For every document on every rank: (rank, first run of the document, how many runs it has
    before the rank's last).
    """
    ranks = runs.rank.max(initial=0) + 1
    key = runs.document * ranks + runs.rank
    held, place = np.unique(key[::-1], return_index=True)
    begin = np.flatnonzero(runs.nth == 0)[held // ranks]
    return held % ranks, begin, len(runs) - 1 - place - begin


def carried(
    runs: PieceRuns,
    run: np.ndarray,
    rounds: np.ndarray | int,
    source: np.ndarray,
    destination: np.ndarray,
    block: np.ndarray | int,
) -> tuple:
    """Hops, as of `table`, that tell what a run does to a state: its map; or, of the first run of a
    document, the state after it, which every rank can tell that holds it: the state before it is
    zero, or given to all ranks.
    """
    head = runs.nth[run] == 0
    after = runs.last[run] + 1
    first = np.where(head, after, runs.first[run])
    last = np.where(head, after, runs.last[run])
    return rounds, source, destination, np.where(head, STATE, MAP), first, last, block

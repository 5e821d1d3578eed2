# SPDX-License-Identifier: Apache-2.0
"""Scan algorithm `all_gather`: a piece's map is sent to every rank with a later piece.

Source: LASP-2 (arXiv 2502.07563). A piece is a run of consecutive positions of a document on one
rank. Its map is its effect on the state of linear attention. A map crosses to another node once, to
one rank that needs it. In a second round, this rank sends the map to the other ranks of its node
that need it.
"""

from __future__ import annotations

import numpy as np

from ...layout.layouts import counted
from .hops import ALL_BLOCKS, MAP, STATE, Hops, PieceRuns, Task, runs_of, table


def all_gather(task: Task) -> Hops:
    """Return the hops of `all_gather`: two rounds, or one round if all ranks share a node."""
    runs = runs_of(task.chains)
    run, rank = users_of_maps(runs)
    intra = task.topology.per_node
    run, rank = np.divmod(np.sort(run * task.topology.size + rank), task.topology.size)
    source = runs.rank[run]
    node, home = rank // intra, source // intra
    # In each other node, the source's index selects the rank that receives a map first.
    opens = np.append(True, (run[1:] != run[:-1]) | (node[1:] != node[:-1]))[: len(run)]
    begin = np.flatnonzero(opens)
    group = np.cumsum(opens) - 1
    size = np.diff(np.append(begin, len(run)))[group]
    gate = rank[begin[group] + source % intra % size]
    straight = (node == home) | (rank == gate)
    return table(
        carried(runs, run, 1 - straight, np.where(straight, source, gate), rank, ALL_BLOCKS),
    )


def users_of_maps(runs: PieceRuns) -> tuple[np.ndarray, np.ndarray]:
    """Return which ranks need the map of which run of pieces, as two parallel arrays (run, rank).

    A run is a sequence of consecutive pieces of a document on one rank. Its map is its effect on a
    state. A rank needs the maps of all earlier runs of other ranks, up to its own last run of the
    document.
    """
    rank, begin, count = _lasts(runs)
    run, rank = counted(begin, count), np.repeat(rank, count)
    elsewhere = runs.rank[run] != rank
    return run[elsewhere], rank[elsewhere]


def count_users(runs: PieceRuns) -> int:
    """Return an upper bound on the number of entries that `users_of_maps` returns.

    The bound also counts the runs that a rank holds itself, which `users_of_maps` omits.
    """
    return int(_lasts(runs)[2].sum())


def _lasts(runs: PieceRuns) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return, for each document and rank, the runs before the rank's last run of the document.

    Returns:
        Three parallel arrays: rank; first run of the document; number of the document's runs before
        the rank's last run.
    """
    ranks = runs.rank.max(initial=0) + 1
    key = runs.document * ranks + runs.rank
    pairs, place = np.unique(key[::-1], return_index=True)
    begin = np.flatnonzero(runs.nth == 0)[pairs // ranks]
    return pairs % ranks, begin, len(runs) - 1 - place - begin


def carried(
    runs: PieceRuns,
    run: np.ndarray,
    rounds: np.ndarray | int,
    source: np.ndarray,
    destination: np.ndarray,
    block: np.ndarray | int,
) -> tuple:
    """Return hops that send the effect of runs of pieces on a state, as an argument of `table`.

    A run is a sequence of consecutive pieces of a document on one rank. A hop carries the map of a
    run, or, for the first run of a document, the state after the run. The rank that holds the first
    run can compute this state, because the state before the run is zero or is available on all
    ranks.
    """
    head = runs.nth[run] == 0
    after = runs.last[run] + 1
    first = np.where(head, after, runs.first[run])
    last = np.where(head, after, runs.last[run])
    return rounds, source, destination, np.where(head, STATE, MAP), first, last, block

# SPDX-License-Identifier: Apache-2.0
"""Scan algorithm `two_level`: maps are sent within nodes, and states between nodes.

A run is a sequence of consecutive pieces of a document on one rank. Consecutive runs of a document
in one node are a segment. In each node, the ranks divide the blocks of the state among themselves.
For each of its blocks, a rank receives this block of the maps of its node, and sends this block of
the state to the next node. For each run in its node, it also sends this block of the state at the
start of the run to the rank that holds the run. So a rank sends the bytes of about two states
within its node. All NICs of a node are in use: together they send one state to the next node, for
any number of ranks.
"""

from __future__ import annotations

import numpy as np

from .all_gather import carried, users_of_maps
from .hops import ALL_BLOCKS, STATE, Hops, PieceRuns, Task, runs_of, table

DIRECT_RUNS = 4  # with at most this many runs, sending each map directly to all users is as fast


def two_level(task: Task) -> Hops:
    """Return the hops of a two-level scan.

    Blocks move from node to node in consecutive rounds, as many per round as a node has ranks. If a
    document is in one node and has few runs, its maps are sent directly to the ranks that need
    them.
    """
    runs = runs_of(task.chains)
    intra = task.topology.per_node
    node = runs.rank // intra
    crosses = (runs.nth > 0) & np.append(False, node[1:] != node[:-1])
    segment = _within(np.cumsum(crosses), runs)  # index of the run's segment in its document
    document = runs.document
    runs_in, segments_in = np.bincount(document), np.bincount(document, crosses)
    straight = ((runs_in <= DIRECT_RUNS) & (segments_in == 0))[document]

    run, rank = users_of_maps(PieceRuns(*(column[straight] for column in runs)))
    run = np.flatnonzero(straight)[run]
    gathered = carried(runs, run, 0, runs.rank[run], rank, ALL_BLOCKS)

    block = np.arange(task.blocks)
    lane, wave = block % intra, block // intra
    sending = np.flatnonzero(runs.follows & ~straight)[:, None]
    lanes = node[sending] * intra + lane
    maps = carried(runs, sending, 0, runs.rank[sending], lanes, block)

    entries = np.flatnonzero(crosses)[:, None]
    before, gates = (node[x] * intra + lane for x in (entries - 1, entries))
    first = runs.first[entries]
    between = (segment[entries] + wave, before, gates, STATE, first, first, block)

    to = np.flatnonzero((runs.nth > 0) & ~straight)[:, None]
    ready = segment[to] + np.where(segment[to] > 0, wave, 0) + 1
    first = runs.first[to]
    handed = (ready, node[to] * intra + lane, runs.rank[to], STATE, first, first, block)
    return table(gathered, maps, between, handed)


def _within(count: np.ndarray, runs: PieceRuns) -> np.ndarray:
    """Return `count - c`, where c is `count` at the first run of the same document.

    Args:
        count: Cumulative count over all runs, [runs].
        runs: Runs of pieces.
    """
    return count - count[runs.nth == 0][runs.document]

# SPDX-License-Identifier: Apache-2.0
"""Two-level scan: maps within nodes, states between nodes, with all NICs of a node in use.

The runs of a chain in one node are a segment of it. Each node has one rank for every block of the
state. That rank receives the block of all maps of the node's segments, and sends the block of the
state on to the next node. It also sends each piece of its node the block of the state that enters
there. So a rank sends about two states within its node. All NICs of a node together send one state
to the next node, for any number of ranks.
"""

from __future__ import annotations

import numpy as np

from .all_gather import carried, users_of_maps
from .hops import ALL_BLOCKS, STATE, Hops, PieceRuns, Task, runs_of, table

DIRECT_RUNS = 4  # up to this many runs in a node, sending each map to all its users costs no more


def two_level(task: Task) -> Hops:
    """Return the hops of a two-level scan.

    Blocks move from node to node in consecutive rounds, as many at once as a node has ranks. If a
    document has few pieces in one node, its maps go directly to the ranks that need them.
    """
    runs = runs_of(task.chains)
    intra = task.topology.per_node
    node = runs.rank // intra
    crosses = (runs.nth > 0) & np.append(False, node[1:] != node[:-1])
    segment = _within(np.cumsum(crosses), runs)  # of its document
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
    """Return a running count of all runs, counted from 0 in each document."""
    return count - count[runs.nth == 0][runs.document]

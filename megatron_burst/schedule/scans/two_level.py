# SPDX-License-Identifier: Apache-2.0
"""Within nodes maps, between nodes states, and all NICs of a node at work.

Runs of a chain that lie in one node are a segment of it. Every block of the state has its rank in
each node: to it go the blocks of all maps of the node's segments, from node to node it passes the
block of the state on, and it tells each piece of its node the block of the state that enters there.
So a rank sends about two states within its node, and one over all NICs of a node together between
nodes, however many ranks a node has.
"""

from __future__ import annotations

import numpy as np

from .all_gather import carried, wanted
from .hops import STATE, WHOLE, Hops, PieceRuns, Task, runs_of, table

FEW = 4  # with at most this many runs in a node, sending each map to all that need it costs no more


def two_level(task: Task) -> Hops:
    """Blocks go from node to node one round after the other, as many at once as a node has ranks.

    Of a document with few pieces, all in one node, maps go straight to the ranks that need them.
    """
    runs = runs_of(task.chains)
    intra = task.topology.per_node
    node = runs.rank // intra
    crosses = (runs.nth > 0) & np.append(False, node[1:] != node[:-1])
    segment = _within(np.cumsum(crosses), runs)  # of its document
    document = runs.document
    runs_in, segments_in = np.bincount(document), np.bincount(document, crosses)
    straight = ((runs_in <= FEW) & (segments_in == 0))[document]

    run, rank = wanted(PieceRuns(*(column[straight] for column in runs)))
    run = np.flatnonzero(straight)[run]
    gathered = carried(runs, run, 0, runs.rank[run], rank, WHOLE)

    block = np.arange(task.blocks)
    lane, wave = block % intra, block // intra
    told = np.flatnonzero(runs.follows & ~straight)[:, None]
    lanes = node[told] * intra + lane
    maps = carried(runs, told, 0, runs.rank[told], lanes, block)

    into = np.flatnonzero(crosses)[:, None]
    before, here = (node[x] * intra + lane for x in (into - 1, into))
    first = runs.first[into]
    between = (segment[into] + wave, before, here, STATE, first, first, block)

    to = np.flatnonzero((runs.nth > 0) & ~straight)[:, None]
    ready = segment[to] + np.where(segment[to] > 0, wave, 0) + 1
    first = runs.first[to]
    handed = (ready, node[to] * intra + lane, runs.rank[to], STATE, first, first, block)
    return table(gathered, maps, between, handed)


def _within(count: np.ndarray, runs: PieceRuns) -> np.ndarray:
    """A running count of all runs, counted from 0 in each document."""
    return count - count[runs.nth == 0][runs.document]

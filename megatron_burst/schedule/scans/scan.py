# SPDX-License-Identifier: Apache-2.0
"""All-Scan of ZeCO (arXiv 2507.01004): the state is sent from piece to piece in blocks.

A piece is a run of consecutive positions of a document on one rank; a chain is all pieces of a
document. A rank receives one block while it sends the previous block, so all ranks are busy after
as many rounds as the chain has hops. With the zigzag layout, the chain visits the ranks in
ascending and then in descending order. The last rank holds the pieces on both sides of the turn, so
the turn needs no hop.

The ring of LASP (arXiv 2404.02882) is this scan with one block, the whole state.
"""

from __future__ import annotations

import numpy as np

from .hops import ALL_BLOCKS, STATE, Hops, Task, runs_of, table


def scan(task: Task) -> Hops:
    """Return the hops of `ring`, each cut into `task.blocks` hops of one block, one per round."""
    runs = runs_of(task.chains)
    to = np.flatnonzero(runs.nth)[:, None]
    block = np.arange(task.blocks)
    first = runs.first[to]
    rounds = runs.nth[to] - 1 + block
    return table((rounds, runs.rank[to - 1], runs.rank[to], STATE, first, first, block))


def ring(task: Task) -> Hops:
    """Return the hops that send a state from rank to rank along each document, one per round."""
    runs = runs_of(task.chains)
    to = np.flatnonzero(runs.nth)
    first = runs.first[to]
    return table(
        (runs.nth[to] - 1, runs.rank[to - 1], runs.rank[to], STATE, first, first, ALL_BLOCKS)
    )

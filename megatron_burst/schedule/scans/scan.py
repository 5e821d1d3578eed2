# SPDX-License-Identifier: Apache-2.0
"""All-Scan of ZeCO (arXiv 2507.01004): the state passes from piece to piece in parts.

A rank receives one part while it sends the part before, so that all ranks are at work after as many
rounds as there are hops in the chain. Zigzag's chain goes up the ranks and back; the last rank
holds the pieces on both sides of the turn, which costs no hop.

The ring of LASP (arXiv 2404.02882) is the same in one part: the whole state passes on.
"""

from __future__ import annotations

import numpy as np

from .hops import STATE, WHOLE, Hops, Task, runs_of, table


def scan(task: Task) -> Hops:
    """The hops of `ring`, each in `task.blocks` parts, one round after the other."""
    runs = runs_of(task.chains)
    to = np.flatnonzero(runs.nth)[:, None]
    block = np.arange(task.blocks)
    first = runs.first[to]
    rounds = runs.nth[to] - 1 + block
    return table((rounds, runs.rank[to - 1], runs.rank[to], STATE, first, first, block))


def ring(task: Task) -> Hops:
    """A hop wherever the next piece of a document is on another rank, one after the other."""
    runs = runs_of(task.chains)
    to = np.flatnonzero(runs.nth)
    first = runs.first[to]
    return table((runs.nth[to] - 1, runs.rank[to - 1], runs.rank[to], STATE, first, first, WHOLE))

"""LASP (arXiv 2404.02882): the whole state passes from piece to piece."""

from __future__ import annotations

import numpy as np

from .hops import STATE, WHOLE, Hops, Task, runs_of, table


def ring(task: Task) -> Hops:
    """A hop wherever the next piece of a document is on another rank, one after the other."""
    runs = runs_of(task.chains)
    to = np.flatnonzero(runs.nth)
    first = runs.first[to]
    return table((runs.nth[to] - 1, runs.rank[to - 1], runs.rank[to], STATE, first, first, WHOLE))

"""LASP (arXiv 2404.02882): the whole state passes from piece to piece."""

from __future__ import annotations

import numpy as np

from .hops import STATE, WHOLE, Hops, Task, table


def ring(task: Task) -> Hops:
    """A hop wherever the next piece of a document is on another rank, one after the other."""
    chains = task.chains
    rounds = np.zeros(len(chains), dtype=int)  # before which the state that enters is not there
    rows = []
    for piece in range(1, len(chains)):
        if chains.begins[piece]:
            continue
        source, destination = chains.rank[piece - 1], chains.rank[piece]
        rounds[piece] = rounds[piece - 1] + (source != destination)
        if source != destination:
            rows.append((rounds[piece - 1], source, destination, STATE, piece, piece, WHOLE))
    return table(rows)

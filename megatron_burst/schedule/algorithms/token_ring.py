"""TokenRing: what travels goes one way round, and what is computed with it goes back the other way.

Source: TokenRing (arXiv 2412.20501). Keys stay. Queries go from neighbour to neighbour round one
ring; the partial output of a step goes with its lse straight back to the owner of the queries, as
many ranks the other way as these had come, while the next step is computed; the owner merges it by
online softmax. It is meant for ranks that are all directly connected, where what travels in
opposite directions does not share a link. Its published code has no backward; here backward does
the same: the side that travels goes on to the next rank, and its gradients straight back. Other
than there, a row moves on only while a rank further along has something to do with it, and the way
round is the one that sends fewer bytes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..demand import Demand
from ..tables import ALL, FAMILIES, RINGS, Kept, Tables, Transfers, joined


def tables(demand: Demand) -> Tables:
    """One ring over all ranks, whatever the links between them.

    Raises ValueError where backward is to find keys that forward kept: forward receives none.
    """
    if demand.kept:
        raise ValueError(
            "kv_cache must be 0 with algorithm token_ring: its forward sends queries, not keys, so "
            "no rank has keys of others to keep"
        )
    forward = demand.row_bytes.out > 0
    if forward:
        demand = replace(demand, side="query")
    family = FAMILIES.index("out") if forward else demand.family(accumulated=True)
    size, bundles = demand.grid.size, demand.travelling
    here, wanted, moves = min(
        (_way(demand, way) for way in (1, -1)),
        key=lambda path: (path[-1].sum(axis=1) * bundles.rows).sum(),
    )
    there, met, sent = np.roll(here, -1, axis=1), bundles.bits(wanted), bundles.bits(moves)

    owner, step = np.nonzero(sent)
    copies = _transfers(
        demand.family(accumulated=False), owner, sent[owner, step], here[owner, step],
        there[owner, step], step,
    )  # fmt: skip
    owner, step = np.nonzero(met)
    rank, rows = here[owner, step], met[owner, step]
    own = np.flatnonzero(demand.visible.diagonal())
    pairs = demand.pairs(
        np.concatenate([own, rank]),
        np.concatenate([np.zeros_like(own), step]),
        np.concatenate([own, owner]),
        np.concatenate([np.full(len(own), ALL), rows]),
    )
    if forward or demand.gradients:  # complete after the step, so it travels beside the next one
        copies = joined(copies, _transfers(family, owner, rows, rank, owner, step + 1))
    nobody = Kept(*(np.zeros(0, dtype=np.int64) for _ in Kept._fields))
    return Tables(size, pairs, copies, nobody, demand.wanted.queries, demand.wanted.keys)


def _way(demand: Demand, way: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where every chunk is [owner, step], 1: with the rank behind its owner at step 1, -1: with the
    one before it; and of each bundle [bundle, step]: does the rank there want it? does it go on?"""
    bundles, steps = demand.travelling, np.arange(demand.grid.size)
    here = (steps[:, None] + way * steps) % len(steps)
    wanted = np.take_along_axis(bundles.wanted, here[bundles.owner], axis=1)
    later = np.flip(np.logical_or.accumulate(np.flip(wanted, axis=1), axis=1), axis=1)
    return here, wanted, np.pad(later[:, 1:], ((0, 0), (0, 1)))


def _transfers(family, owner, rows, src, dst, post) -> Transfers:
    """Hops of one family, each on its way during one step."""
    same = (np.full(len(owner), code, dtype=np.int8) for code in (family, RINGS.index("flat")))
    return Transfers(next(same), owner, rows, src, dst, next(same), post, post + 1)

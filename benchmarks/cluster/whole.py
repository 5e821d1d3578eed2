"""Rivals that send whole chunks, whatever the mask hides: burst, one ring over all ranks, and an
all-gather.

Burst is how chunks travelled before schedules carried rows: a rank that sees anything of a chunk
gets all of it, by the ring or from its owner, whichever sends fewer bytes between nodes. The ring
is Megatron's `p2p`. The all-gather sends every chunk from its owner straight to every rank.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_burst.schedule.algorithms import ALGORITHMS, Algorithm, burst, direct
from megatron_burst.schedule.cost import rows_sent
from megatron_burst.schedule.demand import Demand
from megatron_burst.schedule.tables import Tables

NAME, RING, GATHER = "burst_whole", "ring_whole", "all_gather_whole"


def register() -> None:
    """Enter them among the algorithms of this process; `auto` does not take them."""
    ALGORITHMS.setdefault(NAME, Algorithm(tables, automatic=False))
    ALGORITHMS.setdefault(RING, Algorithm(ring, automatic=False))
    ALGORITHMS.setdefault(
        GATHER, Algorithm(gather, automatic=False, holds_more=True, holds_all=True)
    )


def ring(demand: Demand) -> Tables:
    """One ring over all ranks, of whole chunks."""
    return burst.ring(replace(demand, visibility=demand.visibility.whole()))


def gather(demand: Demand) -> Tables:
    """Every chunk at once from its owner to all who see anything of it."""
    return direct.all_gather(replace(demand, visibility=demand.visibility.whole()))


def tables(demand: Demand) -> Tables:
    """Burst's ring, or chunks sent directly, of whole chunks."""
    whole = replace(demand, visibility=demand.visibility.whole())

    def bytes_sent(found: Tables) -> tuple[int, int]:
        moved = found.transfers
        each = rows_sent(found, moved)
        for index, row in enumerate(demand.row_bytes):
            each[moved.family == index] *= row
        between = moved.between(demand.grid)
        return int(each[between].sum()), int(each.sum())

    return min((burst.tables(whole), direct.tables(whole)), key=bytes_sent)

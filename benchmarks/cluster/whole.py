"""Rivals that send whole chunks for any mask: burst, one ring over all ranks, an all-gather.

`burst_whole` sends all of a chunk to a rank that sees any of its rows, along the ring or from its
owner, whichever sends fewer bytes between nodes. The ring is Megatron's `p2p`. The all-gather sends
every chunk from its owner straight to every rank.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_burst.schedule.algorithms import ALGORITHMS, Algorithm, burst, direct
from megatron_burst.schedule.cost import rows_sent
from megatron_burst.schedule.demand import Demand
from megatron_burst.schedule.tables import Tables

NAME, RING, GATHER = "burst_whole", "ring_whole", "all_gather_whole"


def register() -> None:
    """Register the rivals as algorithms of this process; `auto` does not choose them."""
    ALGORITHMS.setdefault(NAME, Algorithm(tables, automatic=False))
    ALGORITHMS.setdefault(RING, Algorithm(ring, automatic=False))
    ALGORITHMS.setdefault(
        GATHER, Algorithm(gather, automatic=False, holds_more=True, holds_all=True)
    )


def ring(demand: Demand) -> Tables:
    """Return one ring of whole chunks over all ranks."""
    return burst.ring(replace(demand, visibility=demand.visibility.whole()))


def gather(demand: Demand) -> Tables:
    """Return transfers of every chunk from its owner to all ranks that see any of its rows."""
    return direct.all_gather(replace(demand, visibility=demand.visibility.whole()))


def tables(demand: Demand) -> Tables:
    """Return burst's ring or direct transfers, of whole chunks."""
    whole = replace(demand, visibility=demand.visibility.whole())

    def bytes_sent(candidate: Tables) -> tuple[int, int]:
        transfers = candidate.transfers
        sent_bytes = rows_sent(candidate, transfers)
        for index, row in enumerate(demand.row_bytes):
            sent_bytes[transfers.family == index] *= row
        between = transfers.between(demand.grid)
        return int(sent_bytes[between].sum()), int(sent_bytes.sum())

    return min((burst.tables(whole), direct.tables(whole)), key=bytes_sent)

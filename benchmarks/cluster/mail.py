"""Bytes that ranks send each other: messages of a plan, from its tables."""

from __future__ import annotations

import numpy as np

import megatron_burst as mb
from megatron_burst.schedule import cost
from megatron_burst.schedule.rings import Schedule

PASSES = ("forward", "backward")
LINKS = ("intra", "inter")


def of(plan: mb.Plan) -> dict[str, dict]:
    """Return bytes and messages by pass.

    "sent" is the payload bytes of this rank to every global rank, and "messages" its messages by
    link. "least", only on the first rank, is the bytes that all ranks together must send between
    nodes.
    """
    topology, me = plan.groups.topology, plan.groups.rank
    ring, sharing = topology.ring(me), topology.ulysses_group(me)
    heads = plan.sizes.scattered_bytes(topology.ulysses)
    sent, messages, least = {}, {}, {}
    for name, schedule, share in zip(PASSES, plan.schedules, heads, strict=True):
        transfers = schedule.tables.transfers
        sends = transfers.where(transfers.src == plan.groups.ring.rank)
        rank_bytes = np.zeros(topology.size, dtype=np.int64)
        np.add.at(
            rank_bytes, np.array(ring)[sends.dst], cost.message_bytes(schedule, sends, plan.sizes)
        )
        rank_bytes[[peer for peer in sharing if peer != me]] += share
        between = sends.between(schedule.grid)
        counts = int((~between).sum()), int(between.sum())
        messages[name] = {link: plan.head_chunks * n for link, n in zip(LINKS, counts, strict=True)}
        first = plan.groups.rank == 0
        sent[name], least[name] = rank_bytes.tolist(), first * least_between(schedule, plan.sizes)
    return {"sent": sent, "messages": messages, "least": least}


def least_between(schedule: Schedule, sizes: cost.Sizes) -> int:
    """Return the minimum of bytes between nodes if one side is sent.

    Every row crosses once to each other node that needs it, and its gradient once back.
    """
    bundles, grid = schedule.travelling, schedule.grid
    of_node = bundles.users.reshape(len(bundles.owner), grid.inter, grid.intra).any(axis=2)
    of_node[np.arange(len(bundles.owner)), bundles.owner // grid.intra] = False
    row_bytes = sizes.row_bytes(schedule)
    row = getattr(row_bytes, schedule.side) + getattr(row_bytes, "d" + schedule.side)
    return int((bundles.rows * of_node.sum(axis=1)).sum()) * row

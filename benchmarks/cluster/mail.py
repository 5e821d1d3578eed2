"""Who sends how much to whom: the messages of a plan, from the tables that it runs."""

from __future__ import annotations

import numpy as np

import megatron_burst as mb
from megatron_burst.schedule import cost
from megatron_burst.schedule.rings import Schedule

PASSES = ("forward", "backward")
LINKS = ("intra", "inter")


def of(plan: mb.Plan) -> dict[str, dict]:
    """By pass: "sent", payload bytes of this rank to every global rank; "messages", how many of its
    own by link; "least", bytes that all ranks together must send between nodes, of the first."""
    topology, me = plan.groups.topology, plan.groups.rank
    ring, sharing = topology.ring(me), topology.ulysses_group(me)
    heads = plan.sizes.scattered_bytes(topology.ulysses)
    sent, messages, least = {}, {}, {}
    for name, schedule, share in zip(PASSES, plan.schedules, heads, strict=True):
        moved = schedule.tables.transfers
        mine = moved.where(moved.src == plan.groups.ring.rank)
        to = np.zeros(topology.size, dtype=np.int64)
        np.add.at(to, np.array(ring)[mine.dst], cost.message_bytes(schedule, mine, plan.sizes))
        to[[other for other in sharing if other != me]] += share
        between = mine.between(schedule.grid)
        counts = int((~between).sum()), int(between.sum())
        messages[name] = {link: plan.head_chunks * n for link, n in zip(LINKS, counts, strict=True)}
        first = plan.groups.rank == 0
        sent[name], least[name] = to.tolist(), first * least_between(schedule, plan.sizes)
    return {"sent": sent, "messages": messages, "least": least}


def least_between(schedule: Schedule, sizes: cost.Sizes) -> int:
    """Bytes that have to cross between nodes if one side travels: every row once to each other node
    that wants it, and its gradient once from there."""
    bundles, grid = schedule.travelling, schedule.grid
    of_node = bundles.users.reshape(len(bundles.owner), grid.inter, grid.intra).any(axis=2)
    of_node[np.arange(len(bundles.owner)), bundles.owner // grid.intra] = False
    each = sizes.row_bytes(schedule)
    row = getattr(each, schedule.side) + getattr(each, "d" + schedule.side)
    return int((bundles.rows * of_node.sum(axis=1)).sum()) * row

"""The link to the host: what every GPU gets while all of a node copy, and one alone."""

from __future__ import annotations

from ...recompute.host.limits import host_limit
from ...recompute.host.mover import HostMemory
from ...recompute.host.rate import BYTES, copy_rate
from .ranks import Found, Ranks, found

REPEATS = {"cuda": 5, "cpu": 3}


def links(ranks: Ranks) -> tuple[Found, Found]:
    """Bytes per second, one way, of a rank (while all copy, alone); the slower direction, and of
    the ranks the slowest. Collective."""
    # Not more than is there; a copy takes BYTES of it.
    room = max(1, min(4 * BYTES, host_limit(pinned=ranks.cuda) // ranks.per_node))

    def rate() -> float:
        host = HostMemory(room, device=ranks.device, ranks=ranks.per_node)
        return copy_rate(host, lambda: None)

    together, alone = [], []
    for _ in range(REPEATS[ranks.device.type]):
        ranks.each(0.0)
        together.append(min(ranks.each(rate())))
        ranks.each(0.0)
        first = ranks.each(rate() if ranks.local == 0 else float("inf"))
        alone.append(min(first))
    pinned = "pinned" if ranks.cuda else "pageable"
    how = f"{BYTES >> 20} MiB to {pinned} memory and back"
    return found(together, f"all ranks of a node, {how}"), found(alone, f"one rank, {how}")

"""How much slower a device computes while its links carry something."""

from __future__ import annotations

from ...advisor.shapes.models import Model
from ..doctor.gpu.times import seconds
from .kernels import CHUNKS, tile
from .links import LARGEST, Links, begin
from .ranks import Found, Ranks, found

LONGER = 2.0  # times as long as computing the message is to take


def slowdown(ranks: Ranks, model: Model, links: Links) -> Found:
    """The fraction of `Rates`: local attention beside an exchange that outlasts it, over the same
    alone, less 1. The exchange is within nodes where there are such links. Collective."""
    hops, rate = links.busiest
    rows = CHUNKS[ranks.device.type][-2]
    calls = tile(ranks, model, rows)
    once = max(ranks.each(seconds(calls.forward, ranks.device)))
    most = LARGEST[ranks.device.type]
    # Long enough that clocks and the start do not show, short enough for one message.
    times = max(1, min(100, round(most / rate / LONGER / once)))
    size = int(max(2**16, min(most, LONGER * times * once * rate)))

    def compute() -> None:
        for _ in range(times):
            calls.forward()

    start = begin(ranks, hops, size)

    def beside() -> float:
        pending = []
        took = seconds(compute, ranks.device, before=lambda: pending.append(start()))
        pending[0].wait()
        ranks.settle()
        return took

    with_traffic = found(ranks.rounds(beside), "")
    alone = found(ranks.rounds(lambda: seconds(compute, ranks.device)), "")
    how = (
        f"{times} forwards of {rows} rows beside a message of {size} bytes, over the same alone; "
        f"either varies by {max(with_traffic.spread or 0, alone.spread or 0):.1%}"
    )
    return Found(max(0.0, with_traffic.value / alone.value - 1), None, how)

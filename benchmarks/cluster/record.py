"""What is written down of the runs of a rival, once its results and bytes are right."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

import numpy as np

from .cells import Rival
from .mail import LINKS, PASSES
from .measure import Run, Work
from .network import Network
from .ranks import RankError

BYTES_WITHIN = 0.03  # of the formula: the kernel also counts headers and acknowledgements
LARGE = 64 * 1024  # bytes of a message: where they are smaller on average, headers weigh more
Record = dict[str, Any]


def of(network: Network, rival: Rival, works: list[Work], done: list[list[Run]]) -> Record:
    """Times of every run; by pass and link what the busiest interface must carry and a rank sends
    on average, and what the busiest rank must compute."""
    for runs in done:
        check(rival, works, runs)
    wanted = formula(works)
    sent = {link: sum(run.sent[link] for run in done[-1]) for link in LINKS}
    mail = {name: np.array([work.mail.sent[name] for work in works]) for name in PASSES}
    return {
        "name": rival.name,
        "seconds": [
            {name: span([run.clock[name] for run in runs]) for name in PASSES} for runs in done
        ],
        "busiest": {
            name: {link: int(network.loads(mail[name], link).max()) for link in LINKS}
            for name in PASSES
        },
        "sender": _of_ranks(works, max),
        "mean": _of_ranks(works, lambda sizes: sum(sizes) / network.size),
        "messages": {
            name: {link: sum(work.mail.messages[name][link] for work in works) for link in LINKS}
            for name in PASSES
        },
        "least": works[0].mail.least,
        "flops": {name: max(work.flops[name] for work in works) for name in PASSES},
        "imbalance": _imbalance(works),
        "bytes": {link: {"formula": wanted[link], "kernel": sent[link]} for link in LINKS},
        "chosen": works[0].chosen,
        "error": max(run.error for runs in done for run in runs),
    }


def _of_ranks(works: list[Work], found: Any) -> dict[str, dict[str, int]]:
    return {
        name: {link: int(found([work.bytes[name][link] for work in works])) for link in LINKS}
        for name in PASSES
    }


def _imbalance(works: list[Work]) -> float:
    """FLOPs of the busiest rank over their mean."""
    flops = [sum(work.flops.values()) for work in works]
    return max(flops) * len(flops) / sum(flops)


def formula(works: list[Work]) -> dict[str, int]:
    """Payload bytes of all ranks, by link class."""
    return {link: sum(work.bytes[p][link] for work in works for p in PASSES) for link in LINKS}


def check(rival: Rival, works: list[Work], runs: list[Run]) -> None:
    """No run counts unless its result is right and its bytes are those of the formula: counted by
    the transport exactly, by the kernel within 3 % where messages are large."""
    for rank, (run, work) in enumerate(zip(runs, works, strict=True)):
        if not run.error <= run.most:
            raise RankError(f"{rival.name}: rank {rank} is off by {run.error:.3g}")
        mine = {link: sum(work.bytes[p][link] for p in PASSES) for link in LINKS}
        if run.counted != mine:
            raise RankError(
                f"{rival.name}: rank {rank} sent {run.counted}, the formula says {mine}"
            )
    for link, total in formula(works).items():
        messages = sum(work.mail.messages[p][link] for work in works for p in PASSES)
        if total < LARGE * messages:
            continue
        sent = sum(run.sent[link] for run in runs)
        # what barriers and the making of connections cost is a few KB, whatever is measured
        if abs(sent - total) > BYTES_WITHIN * total + 20_000 * len(runs):
            raise RankError(
                f"{rival.name}: the kernel counted {sent} {link} bytes, the formula says {total}"
            )


def span(clocks: list[tuple[float, float]]) -> float:
    """Seconds from the first rank's start to the last one's end; all ranks share one clock."""
    return max(end for _, end in clocks) - min(begin for begin, _ in clocks)


def slower(
    runs: Mapping[Rival, list[list[Run]]], factor: float
) -> dict[Rival, tuple[float, Rival]]:
    """Rivals that take clearly longer than another one of the same algorithm and layout: how many
    times as long, and as which."""
    times = {
        rival: median(sum(span([run.clock[p] for run in one]) for p in PASSES) for one in done)
        for rival, done in runs.items()
    }
    found = {}
    for rival, seconds in times.items():
        alike = (r for r in times if (r.algorithm, r.layout) == (rival.algorithm, rival.layout))
        best = min(alike, key=times.__getitem__)
        if seconds > factor * times[best]:
            found[rival] = seconds / times[best], best
    return found

"""Costs and runs of a rival, compared with each other and then stored.

A run counts only if its results and bytes are right. All benchmarks on the emulated cluster use
this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from .mail import LINKS, PASSES
from .network import Network
from .ranks import RankError

BYTES_WITHIN = 0.03  # relative to the formula; the kernel also counts headers and acknowledgements
LARGE = 64 * 1024  # bytes of a message; headers are a larger share of smaller messages
MIB = 1 << 20
Record = dict[str, Any]
ByLink = dict[str, dict[str, int]]  # pass -> link class -> number


class WrongRun(RankError):
    """Error of a run whose results or bytes are wrong."""


class Work(NamedTuple):
    """Costs of a rival for one rank, by pass.

    Attributes:
        bytes: Payload by link.
        sent: Payload to every rank.
        says: Settings of the rival, or the choice of "auto" with the reason.
        flops: FLOPs.
        messages: Messages by link.
        least: Minimum that all ranks together send between nodes.
    """

    bytes: ByLink
    sent: dict[str, list[int]]
    says: str = ""
    flops: Mapping[str, float] = {}
    messages: Mapping[str, dict[str, int]] = {}
    least: Mapping[str, int] = {}


class Run(NamedTuple):
    """One timed run on one rank.

    Attributes:
        clock: Clock readings by pass.
        sent: Bytes by link, by the kernel's counters.
        counted: Bytes by link, by our transport's counters.
        error: Worst relative error.
        most: Bound of the error.
        busy: Seconds for which the rank's own thread was busy.
    """

    clock: dict[str, tuple[float, float]]
    sent: dict[str, int]
    counted: dict[str, int] | None
    error: float
    most: float
    busy: float = 0.0


def of(network: Network, name: str, works: list[Work], rounds: list[list[Run]]) -> Record:
    """Return times of every run, and bytes and FLOPs of the busiest interface and rank."""
    for runs in rounds:
        check(name, works, runs)
    mail = {p: np.array([work.sent[p] for work in works]) for p in PASSES}
    flops = [[work.flops.get(p, 0.0) for p in PASSES] for work in works]
    mean = sum(map(sum, flops)) / len(flops)
    return {
        "name": name,
        "seconds": seconds(rounds),
        "busiest": {
            p: {link: int(network.loads(mail[p], link).max()) for link in LINKS} for p in PASSES
        },
        "sender": _of_ranks(works, max),
        "mean": _of_ranks(works, lambda sizes: sum(sizes) / network.size),
        "messages": {link: _messages(works, link) for link in LINKS},
        "least": sum(sum(work.least.values()) for work in works),
        "flops": dict(zip(PASSES, map(max, zip(*flops, strict=True)), strict=True)),
        "imbalance": max(map(sum, flops)) / mean if mean else None,
        "bytes": {
            link: {
                "formula": formula(works)[link],
                "kernel": int(median(sum(run.sent[link] for run in runs) for runs in rounds)),
            }
            for link in LINKS
        },
        "busy": median(sum(run.busy for run in runs) / len(runs) for runs in rounds),
        "says": works[0].says,
        "error": max(run.error for runs in rounds for run in runs),
    }


def seconds(rounds: Sequence[Sequence[Run]]) -> list[dict[str, float]]:
    """Return seconds of every run by pass, from the first start to the last end over ranks."""
    return [{p: span([run.clock[p] for run in runs]) for p in PASSES} for runs in rounds]


def span(clocks: Sequence[tuple[float, float]]) -> float:
    """Return seconds from the first start to the last end; all ranks share one clock."""
    return max(end for _, end in clocks) - min(begin for begin, _ in clocks)


def formula(works: Sequence[Work]) -> dict[str, int]:
    """Return payload bytes of all ranks in both passes, by link class."""
    return {link: sum(work.bytes[p][link] for work in works for p in PASSES) for link in LINKS}


def _of_ranks(works: Sequence[Work], reduce_ranks: Any) -> ByLink:
    return {
        p: {link: int(reduce_ranks([work.bytes[p][link] for work in works])) for link in LINKS}
        for p in PASSES
    }


def _messages(works: Sequence[Work], link: str) -> int:
    return sum(link_messages[link] for work in works for link_messages in work.messages.values())


def check(name: str, works: Sequence[Work], runs: Sequence[Run]) -> None:
    """Raise WrongRun if results are wrong or bytes differ from the formula.

    The transport's counters must agree exactly, the kernel's within 3 % if messages are large.
    """
    for rank, (run, work) in enumerate(zip(runs, works, strict=True)):
        if not run.error <= run.most:
            raise WrongRun(f"{name}: rank {rank} is off by {run.error:.3g}, allowed {run.most:.3g}")
        expected = formula([work])
        if run.counted not in (None, expected):
            raise WrongRun(f"{name}: rank {rank} sent {run.counted}, expected {expected}")
    for link, total in formula(works).items():
        if total < LARGE * _messages(works, link):
            continue
        sent = sum(run.sent[link] for run in runs)
        # barriers and new connections add a few KB
        if abs(sent - total) > BYTES_WITHIN * total + 20_000 * len(runs):
            raise WrongRun(f"{name}: the kernel counted {sent} {link} bytes, expected {total}")

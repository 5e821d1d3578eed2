"""Runs the settings: every rival in turn, again and again, on one cluster.

Rivals of a setting run one after the other in each round, so whatever else the machine does hits
all alike, and ratios are taken within a round.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import numpy as np

from benchmarks.cluster.bench import TIMEOUT, built
from benchmarks.cluster.mail import LINKS, PASSES
from benchmarks.cluster.measure import transfer
from benchmarks.cluster.network import Network, Rates
from benchmarks.cluster.ranks import RankError, Ranks
from benchmarks.cluster.record import BYTES_WITHIN, span

from . import measure
from .measure import Run, Work
from .settings import ALGORITHMS, ALL_TO_ALL, CONVOLUTION, GATHER, Setting, refusal

PRELOAD = ("megatron.core.ssm.gated_delta_net.common",)
PLAIN = 0.2  # seconds of a plain transfer at the nominal rate
MORE = 2  # times as many runs of small states, which take no time and vary more
Record = dict[str, Any]
Say = Callable[[str], None]


def rivals(setting: Setting, size: int) -> list[str]:
    """All that can run here."""
    names = (ALL_TO_ALL, GATHER, *ALGORITHMS, CONVOLUTION)
    return [name for name in names if refusal(setting, name, size) is None]


def run_settings(
    todo: Sequence[Setting], grid: tuple[int, int], rates: str, repeats: int, say: Say
) -> Iterator[Record]:
    """One record per setting; `repeats` runs of each rival, of small states more."""
    network = Network(*grid, Rates.parse(rates))
    with built(network), Ranks(network, TIMEOUT, PRELOAD) as ranks:
        for setting in todo:
            shared = refusal(setting, ALL_TO_ALL, network.size) is None
            yield one_setting(ranks, setting, repeats if shared else MORE * repeats, say)


def one_setting(ranks: Ranks, setting: Setting, repeats: int, say: Say) -> Record:
    network = ranks.network
    ranks.run(measure.load, setting)
    measured = ranks.run(measure.rates)[0]
    names = rivals(setting, network.size)
    works: dict[str, list[Work]] = {}
    for name in names:
        say(f"{setting.words}: {name}, warming up")
        works[name] = ranks.run(measure.prepare, name, measured)
    plain: dict[str, list[float]] = {link: [] for link in LINKS}
    runs: dict[str, list[list[Run]]] = {name: [] for name in names}
    loads = []
    for repeat in range(repeats):
        loads.append(os.getloadavg()[0])
        for link, rate in plain_rates(ranks).items():
            plain[link].append(rate)
        for name in names:
            say(f"{setting.words}: {name} ({repeat + 1}/{repeats})")
            runs[name].append(ranks.run(measure.timed, name))
    return {
        "setting": setting._asdict(),
        "grid": [network.nodes, network.per_node],
        "rates": str(network.rates),
        "measured": {
            "intra": measured.intra,
            "inter": measured.inter,
            "latency": measured.latency,
            "posting": measured.posting,
        },
        "plain": plain,
        "load": [round(x, 1) for x in loads],
        "cores": os.cpu_count(),
        "rivals": [of(network, name, works[name], runs[name]) for name in names],
    }


def plain_rates(ranks: Ranks) -> dict[str, float]:
    """Payload bits per second that each link class carries when nothing else is asked of it."""
    sizes = {link: int(PLAIN * ranks.network.rates.of(link) / 8) for link in LINKS}
    clocks = ranks.run(transfer, sizes)
    return {link: 8 * sizes[link] / span([clock[link] for clock in clocks]) for link in clocks[0]}


def of(network: Network, name: str, works: list[Work], done: list[list[Run]]) -> Record:
    """What is kept of a rival's runs: seconds of every one, and bytes by link class: a rank's mean,
    what the busiest interface carries, and what the kernel counted; for how long a rank's own
    thread was busy, on average."""
    totals = formula(network, works)
    for runs in done:
        check(name, totals, runs)
    mail = {p: np.array([work.sent[p] for work in works]) for p in PASSES}
    return {
        "name": name,
        "says": works[0].says,
        "seconds": [{p: span([run.clock[p] for run in runs]) for p in PASSES} for runs in done],
        "busiest": {
            p: {link: int(network.loads(mail[p], link).max()) for link in LINKS} for p in PASSES
        },
        "bytes": {
            link: {
                "formula": totals[link],
                "kernel": int(median(sum(run.kernel[link] for run in runs) for runs in done)),
            }
            for link in LINKS
        },
        "busy": median(sum(run.busy for run in runs) / len(runs) for runs in done),
        "error": max(run.error for runs in done for run in runs),
    }


def formula(network: Network, works: list[Work]) -> dict[str, int]:
    """Payload bytes of all ranks in both passes, by link class."""
    total = dict.fromkeys(LINKS, 0)
    for rank, work in enumerate(works):
        for p in PASSES:
            for other, n in enumerate(work.sent[p]):
                if other != rank:
                    total[network.link(rank, other)] += n
    return total


def check(name: str, totals: dict[str, int], runs: list[Run]) -> None:
    """No run counts unless it is right, and its bytes are those of the formula: as the transport
    counted them exactly, as the kernel did within 3 % and what barriers cost."""
    for rank, run in enumerate(runs):
        if not run.error <= measure.TOLERANCE:
            raise RankError(f"{name}: rank {rank} is off by {run.error:.3g}")
    for link, total in totals.items():
        own = [run.counted[link] for run in runs if run.counted is not None]
        if name not in (ALL_TO_ALL, GATHER) and sum(own) != total:
            raise RankError(f"{name}: ranks sent {sum(own)} {link} bytes, the formula says {total}")
        sent = sum(run.kernel[link] for run in runs)
        if abs(sent - total) > BYTES_WITHIN * total + 20_000 * len(runs):
            raise RankError(
                f"{name}: the kernel counted {sent} {link} bytes, the formula says {total}"
            )

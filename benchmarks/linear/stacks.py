"""Runs of the hybrid stack: every attention in turn, several times, by amount of compute.

Burst's attention alone computes `REGIMES[regime]` times as long as its links are busy; linear
layers compute at the same speed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.cluster import record
from benchmarks.cluster.bench import Say, cluster, in_turn
from benchmarks.cluster.cells import REGIMES
from benchmarks.cluster.mail import LINKS, PASSES
from benchmarks.cluster.network import Network, Rates
from benchmarks.cluster.record import Run, Work

from . import hybrid, measure
from .bench import PRELOAD
from .hybrid import LINEAR_BACKWARD, LINEAR_LAYERS
from .settings import ATTENTIONS, Stack

Record = dict[str, Any]
SPEED_OF = "burst"  # the links of this attention determine the speed of compute


def run_stack(
    stack: Stack, regimes: Sequence[str], grid: tuple[int, int], rates: str, repeats: int, say: Say
) -> Iterator[Record]:
    """Yield one record per regime."""
    network = Network(*grid, Rates.parse(rates))
    with cluster(network, PRELOAD) as ranks:
        ranks.run(measure.load, stack.setting)
        measured = ranks.run(measure.rates)[0]
        ranks.run(hybrid.load, stack, measured)
        works: dict[str, list[Work]] = {}
        autos = [attention for attention in ATTENTIONS if attention.algorithm == "auto"]
        for attention in (attention for attention in ATTENTIONS if attention not in autos):
            say(f"stack: {attention.name}, warming up")
            works[attention.name] = ranks.run(hybrid.prepare, attention, measured)
        for regime in regimes:
            speed = speed_of(works[SPEED_OF], regime, network)
            regime_rates = replace(measured, compute=speed or math.inf)
            for attention in autos:
                works[attention.name] = ranks.run(hybrid.prepare, attention, regime_rates)
            call, label = (hybrid.timed, speed), f"stack, {regime}"
            runs, turn_record = in_turn(
                ranks, works, repeats, call, lambda x, w=label: say(f"{w}: {x}")
            )
            yield turn_record | {
                "stack": stack._asdict(),
                "regime": regime,
                "grid": list(grid),
                "rates": rates,
                "gflops": speed / 1e9,
                "rivals": [
                    _of(name, works[name], rounds, stack, speed) for name, rounds in runs.items()
                ],
            }


def speed_of(works: list[Work], regime: str, network: Network) -> float:
    """Return FLOP/s, 0.0 if compute takes no time."""
    share = REGIMES[regime]
    busy = sum(max(busiest(works, p)[link] * 8 / network.rates.of(link) for link in LINKS)
               for p in PASSES)  # fmt: skip
    return max(sum(w.flops.values()) for w in works) / (share * busy) if share else 0.0


def busiest(works: list[Work], name: str) -> dict[str, int]:
    """Return bytes of the rank that sends most, by link class."""
    return {link: max(w.bytes[name][link] for w in works) for link in LINKS}


def _of(
    name: str, works: list[Work], rounds: list[list[Run]], stack: Stack, speed: float
) -> Record:
    attention = max(sum(w.flops.values()) for w in works)
    linear = LINEAR_LAYERS * (1 + LINEAR_BACKWARD) * stack.linear_flops
    return {
        "name": name,
        "says": works[0].says,
        "seconds": record.seconds(rounds),
        "busiest": {p: busiest(works, p) for p in PASSES},
        "compute": (attention + linear) / speed if speed else 0.0,
    }

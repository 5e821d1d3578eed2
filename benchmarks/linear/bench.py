"""Runs of all settings: every rival in turn, several times, on one cluster.

Rivals of a setting run one after the other in each round, so that other load affects all of them,
and ratios are taken within a round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.cluster import record
from benchmarks.cluster.bench import Say, cluster, in_turn
from benchmarks.cluster.network import Network, Rates
from benchmarks.cluster.ranks import Ranks

from . import measure
from .settings import ALGORITHMS, ALL_TO_ALL, CONVOLUTION, GATHER, Setting, refusal

PRELOAD = (  # forkserver ignores a module that this Megatron does not have
    "megatron.core.ssm.gated_delta_net.common", "megatron.core.ops.ssm.gated_delta.common",
)  # fmt: skip
MORE = 2  # times as many runs of small states, which take no time and vary more
Record = dict[str, Any]


def rivals(setting: Setting, size: int) -> list[str]:
    """Return all rivals that can run here."""
    names = (ALL_TO_ALL, GATHER, *ALGORITHMS, CONVOLUTION)
    return [name for name in names if refusal(setting, name, size) is None]


def run_settings(
    chosen_settings: Sequence[Setting], grid: tuple[int, int], rates: str, repeats: int, say: Say
) -> Iterator[Record]:
    """Yield one record per setting, with `repeats` runs of each rival, more for small states."""
    with cluster(Network(*grid, Rates.parse(rates)), PRELOAD) as ranks:
        for setting in chosen_settings:
            shared = refusal(setting, ALL_TO_ALL, ranks.network.size) is None
            yield one_setting(ranks, setting, repeats if shared else MORE * repeats, say)


def one_setting(ranks: Ranks, setting: Setting, repeats: int, say: Say) -> Record:
    network, works = ranks.network, {}
    ranks.run(measure.load, setting)
    measured = ranks.run(measure.rates)[0]
    for name in rivals(setting, network.size):
        say(f"{setting.words}: {name}, warming up")
        works[name] = ranks.run(measure.prepare, name, measured)
    runs, turn_record = in_turn(
        ranks, works, repeats, [measure.timed], lambda text: say(f"{setting.words}: {text}")
    )
    return turn_record | {
        "setting": setting._asdict(),
        "grid": [network.nodes, network.per_node],
        "rates": str(network.rates),
        "measured": dataclasses.asdict(measured),
        "rivals": [record.of(network, name, works[name], rounds) for name, rounds in runs.items()],
    }

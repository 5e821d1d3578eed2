"""Runs of all rivals in turn on the emulated cluster, in each regime, and their table."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.cluster import record
from benchmarks.cluster.bench import Say, cluster, in_turn
from benchmarks.cluster.network import Network, Rates
from benchmarks.report import Ratio, markdown, spread

from . import measure
from .settings import ALGORITHMS, DIRECT, GATHERS, GRID, RATES, REGIMES, Layer

Record = dict[str, Any]


def run(layer: Layer, regimes: Sequence[str], repeats: int, say: Say) -> list[Record]:
    """Yield one record per regime."""
    records, network = [], Network(*GRID, Rates.parse(RATES))
    with cluster(network) as ranks:
        ranks.run(measure.load, layer)
        works = {}
        for name in (*GATHERS, *(name for name in ALGORITHMS if name != "auto")):
            say(f"{name}, warming up")
            works[name] = ranks.run(measure.prepare, name)
        links = [_seconds([ranks.run(measure.timed, DIRECT, math.inf)])[0] for _ in range(3)]
        flops = max(sum(work.flops.values()) for work in works[DIRECT])
        for regime in regimes:
            share = REGIMES[regime]
            speed = flops / (share * median(links)) if share else math.inf
            rates = ranks.run(measure.rates, speed)
            median_rates = dataclasses.replace(
                rates[0], launch=median(rank_rates.launch for rank_rates in rates)
            )
            say(f"{regime}: auto, choosing")
            works["auto"] = ranks.run(measure.prepare, "auto", median_rates)
            predicted = ranks.run(measure.predicted, "auto")[0]
            call = measure.timed, speed
            runs, around = in_turn(
                ranks, works, repeats, call, lambda x, w=regime: say(f"{w}: {x}")
            )
            for name, done in runs.items():
                for rank_runs in done:
                    record.check(name, works[name], rank_runs)
            records.append(around | {
                "regime": regime, "compute": flops / speed, "says": works["auto"][0].says,
                "sent": {name: record.formula(rank_works) for name, rank_works in works.items()},
                "predicted": predicted,
                "seconds": {name: _seconds(done) for name, done in runs.items()},
            })  # fmt: skip
    return records


def _seconds(done: Any) -> list[float]:
    return [sum(passes.values()) for passes in record.seconds(done)]


def table(records: Sequence[Record]) -> str:
    """Return seconds of each rival, ratios to the gathering rival, and of auto to the best."""
    rows = []
    for result in records:
        seconds, size = result["seconds"], GRID[0] * GRID[1]
        ours = {n: median(x) for n, x in seconds.items() if n not in (*GATHERS, "auto")}
        best = min(ours, key=ours.__getitem__)
        for name, times in seconds.items():
            says = f" ({result['says']})" if name == "auto" else ""
            sent = result["sent"][name]["inter"] / size / 1e6
            predicted = result["predicted"].get(name)
            above = f"{median(times) / result['compute']:.2f}" if result["compute"] else ""
            rows.append([
                result["regime"], f"{name}{says}", spread(times),
                f"{predicted:.2f}" if predicted else "", f"{sent:.1f}",
                *(str(Ratio.of(times, seconds[way])) for way in GATHERS), above,
                str(Ratio.of(times, seconds[best])),
            ])  # fmt: skip
    heads = ["regime", "", "seconds", "predicted", "MB between nodes, a rank", "of direct gather",
             "of gather by node", "of compute alone", "of our best"]  # fmt: skip
    return markdown(heads, rows)

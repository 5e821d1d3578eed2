"""What a slow GPU, a slow NIC and jitter cost each algorithm: 64 context-parallel ranks on H100.

Nothing here is measured or published: it is what the model of time says, for a reader who has to
choose an algorithm on a cluster that is not perfect.
`python -m benchmarks.advise --sections faults`.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable

from benchmarks.advise.section import Figure, Section
from megatron_burst.autotune.clusters import Cluster
from megatron_burst.tools.advise.forecast.attention_time import AttentionTime, attention_time
from megatron_burst.tools.advise.forecast.faults import Faults
from megatron_burst.tools.advise.settings import Settings
from megatron_burst.tools.advise.shapes.models import named

MODEL = named("llama3-8b")
RANKS = 64
LENGTHS = (2**18, 2**20)
SLOW_GPU, SLOW_NIC, JITTER = 1.2, 2.0, 0.05
# Name -> ranks that share heads.
ALGORITHMS = {"ring": 1, "double_ring": 1, "burst": 1, "hybrid": 8, "multicast": 1,
              "all_gather": 1, "prefetch": 1, "tile": 1}  # fmt: skip


def settings(algorithm: str, seq: int, ranks: int = RANKS) -> Settings:
    """A run of one context-parallel group."""
    return Settings(seq, cp=ranks, algorithm=algorithm, ulysses=ALGORITHMS[algorithm])


def worst(cluster: Cluster, run: Settings, fault: Callable[[int], Faults]) -> float:
    """Seconds with a fault of the one GPU of the first node whose fault costs most."""
    found = [
        attention_time(MODEL, cluster, run, fault(gpu)).seconds
        for gpu in range(cluster.ranks_per_node)
    ]
    return max(found)


def row(cluster: Cluster, algorithm: str, seq: int) -> tuple[list[str], list[float]]:
    """A row as text, and the three costs as fractions."""
    run = settings(algorithm, seq)
    plain = attention_time(MODEL, cluster, run).seconds
    jittered: AttentionTime = attention_time(MODEL, cluster, run, Faults(jitter=JITTER))
    costs = [
        worst(cluster, run, lambda gpu: Faults({gpu: SLOW_GPU})) / plain - 1,
        worst(cluster, run, lambda gpu: Faults({}, {gpu: SLOW_NIC})) / plain - 1,
        jittered.seconds / plain - 1,
    ]
    spread = jittered.spread / plain
    shown = [f"{cost:+.1%}" for cost in costs]
    shown[2] += f" (± {spread:.1%})"
    return [f"{seq // 1024}K", algorithm, f"{plain * 1e3:.1f}", *shown], costs


def run(fit: bool = False) -> Section:
    """The table; nothing is fitted."""
    cluster = Cluster("h100", RANKS)  # pyright: ignore[reportArgumentType]
    rows = [row(cluster, name, seq) for seq in LENGTHS for name in ALGORITHMS]
    seconds, gigabytes = largest()
    return Section(
        name="faults",
        title="What faults cost each algorithm",
        intro=[
            f"One attention call, forward and backward, of {MODEL.name} on {RANKS} "
            f"context-parallel ranks: {RANKS // cluster.per_node} nodes of {cluster.per_node} "
            "H100 at published rates. Predicted, not measured. One GPU of the first node computes "
            f"{SLOW_GPU:g} times as long; or one of its NICs has half its rate (of the eight, the "
            f"one that costs most); or the time of every computed pair and every message varies by "
            f"{JITTER:.0%} (mean of eight draws, and their standard deviation).",
        ],
        columns=["sequence", "algorithm", "ms", "slow GPU", "slow NIC", "jitter"],
        rows=[shown for shown, _ in rows],
        figures=[
            Figure("1,024 ranks in one group, the slowest algorithm to simulate",
                   f"{seconds:.0f} s with a slow GPU, {gigabytes:.1f} GB"),
        ],
        notes=notes([costs for _, costs in rows]),
    )  # fmt: skip


def notes(costs: list[list[float]]) -> list[str]:
    """What stands out, from the figures themselves."""
    names = [(seq, name) for seq in LENGTHS for name in ALGORITHMS]
    (seq, name), most = max(zip(names, costs, strict=True), key=lambda each: each[1][1])
    least = [n for (s, n), c in zip(names, costs, strict=True) if s == seq and c[1] < 0.02]
    return [
        f"A slow NIC costs most with {name} at {seq // 1024}K ({most[1]:+.0%}), and less than 2 % "
        f"there with {', '.join(least) or 'none'}: their links between nodes have time to spare, "
        "or a faulty link carries little. A slow GPU costs little only where links are the "
        "bottleneck anyhow; no algorithm gives a slow rank less to compute."
    ]


def largest(ranks: int = 1024, seq: int = 2**24) -> tuple[float, float]:
    """Processor seconds and peak gigabytes of simulating the largest group, the slowest to do."""
    cluster = Cluster("h100", ranks)  # pyright: ignore[reportArgumentType]
    slowest = 0.0
    for name in ALGORITHMS:
        start = time.process_time()
        attention_time(MODEL, cluster, settings(name, seq, ranks), Faults({5: SLOW_GPU}))
        slowest = max(slowest, time.process_time() - start)
    return slowest, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9

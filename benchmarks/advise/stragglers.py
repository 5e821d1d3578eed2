"""What stragglers cost a step of 12,288 GPUs: DP x CP x PP, one or few of them slow.

Predicted, not measured: groups by the event model of rings, stages by that of pipelines, replicas
by the slowest. `python -m benchmarks.advise --sections stragglers`.
"""

from __future__ import annotations

import time

from benchmarks.advise.section import Figure, Section
from megatron_burst.autotune.clusters import Cluster
from megatron_burst.tools.advise.forecast.faults import Faults
from megatron_burst.tools.advise.settings import Settings
from megatron_burst.tools.advise.simulate import simulate

MODEL = "llama3-405b"
GPUS = 12_288
RUN = Settings(2**17, tp=8, cp=16, pp=6, dp=16, micro_batches=16)
STAGE, REPLICA = RUN.tp * RUN.cp * RUN.dp, RUN.tp * RUN.cp

# The first GPU of a stage of the first replica, and of the same stage of the second.
FIRST, MIDDLE, LAST = 0, 3 * STAGE, 5 * STAGE
CASES: dict[str, Faults] = {
    "a GPU of the first stage 1.2x": Faults({FIRST: 1.2}),
    "a GPU of a middle stage 1.2x": Faults({MIDDLE: 1.2}),
    "a GPU of the last stage 1.2x": Faults({LAST: 1.2}),
    "one in each of two replicas": Faults({MIDDLE: 1.2, MIDDLE + REPLICA: 1.2}),
    "one in each of two stages of a replica": Faults({FIRST: 1.2, MIDDLE: 1.2}),
    "half the rate of a NIC": Faults({}, {MIDDLE: 2.0}),
    "half the rate of a node's NICs": Faults({}, {f"node {MIDDLE // 8}": 2.0}),
    "jitter 2 %": Faults(jitter=0.02),
    "jitter 5 %": Faults(jitter=0.05),
    "jitter 5 %, a slow GPU, a slow NIC": Faults({MIDDLE: 1.2}, {LAST: 2.0}, 0.05),
}


def run(fit: bool = False) -> Section:
    """The table; nothing is fitted."""
    cluster = Cluster("h100", GPUS)  # pyright: ignore[reportArgumentType]
    plain = simulate(MODEL, cluster, RUN)
    start = time.process_time()
    found = {name: simulate(MODEL, cluster, RUN, faults=faults) for name, faults in CASES.items()}
    each = (time.process_time() - start) / len(CASES)
    rows = [
        [name, f"{step.seconds:.2f}", f"{step.seconds / plain.seconds - 1:+.1%}"]
        for name, step in {"none": plain, **found}.items()
    ]
    return Section(
        name="stragglers",
        title="What stragglers cost a large run",
        intro=[
            f"One step of {MODEL} on {GPUS:,} H100: TP {RUN.tp} x CP {RUN.cp} x PP {RUN.pp} x DP "
            f"{RUN.dp}, {RUN.seq // 1024}K tokens, {RUN.micro_batches} micro-batches, 1F1B. "
            "Predicted from published rates, not measured.",
        ],
        columns=["fault", "step, s", "cost"],
        rows=rows,
        figures=[Figure("to simulate a step with faults", f"{each:.1f} s on average")],
        notes=[
            "All replicas wait for the slowest one, so a second slow replica costs nothing more, "
            "and a second slow stage of one replica does. The first stage has fewer waits to fill "
            "than a middle one and loses less.",
        ],
    )

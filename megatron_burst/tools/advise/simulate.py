# SPDX-License-Identifier: Apache-2.0
"""`mb.simulate`: how long one attention call, one layer or one step takes, from plain numbers.

The public door of the model of time; `advise` and the fits of the documentation use the same code.
Under faults the slowest rank sets the pace of all that wait for it: ranks of one stage of one
replica wait for one another in every layer, stages in the pipeline's order for every micro-batch,
and replicas where gradients are summed. Only groups that a fault touches are simulated, each once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from ...autotune import cluster_file
from ...autotune.clusters import Cluster, gpu
from ...autotune.gpus import assumed_kernel
from .account.steps import parts_of
from .forecast.attention_time import AttentionTime, attention_time
from .forecast.faults import Faults, Group, groups
from .forecast.layer_time import (
    ATTENTION,
    EXPERTS,
    HOST,
    STATES,
    TENSOR,
    LayerTime,
    SecondsByPart,
    layer_time,
    products,
)
from .forecast.pipeline import pipeline_seconds
from .forecast.step_time import GATHERING, GRADIENTS, HEAD, StepTime, stages_of, step_time
from .settings import Settings, check
from .shapes import models
from .shapes.model import LayerPart, Model

STRAGGLERS = "stragglers"
COMMUNICATED = (TENSOR, EXPERTS, HOST, STATES, ATTENTION)  # not computed by this rank, or simulated
SAMPLES = 256


def layer_under(model: Model, cluster: Cluster, run: Settings, faults: Faults) -> LayerTime:
    """One layer of the group that is slowed most."""
    found = [
        _layer(model, cluster, run, None, faults, each, factor)
        for each, factor in _factors(model, cluster, run, faults)
    ]
    return max(found, key=lambda layer: layer.seconds)


def step_under(model: Model, cluster: Cluster, run: Settings, faults: Faults) -> StepTime:
    """One step: that without faults, and `stragglers`, how much longer all then wait.

    The reduction of gradients and the gathering of parameters are as slow as their slowest NIC.
    """
    plain = step_time(model, cluster, run)
    before = _pipelined(_stages(model, cluster, run, None, None, 1.0), run)
    factors = _factors(model, cluster, run, faults)
    timed = {each: _stages(model, cluster, run, faults, each, factor) for each, factor in factors}
    usual = timed[factors[0][0]]
    replicas = [
        [timed.get(Group(dp, pp), usual)[pp] for pp in range(run.pp)] for dp in range(run.dp)
    ]
    longest = [_longest(replicas, run, faults, draw) for draw in range(faults.passes)]
    extra = float(np.mean(longest)) - before
    if run.tp * run.cp * run.dp > cluster.ranks_per_node:
        reduced = plain.parts.get(GRADIENTS, 0.0) + plain.parts.get(GATHERING, 0.0)
        extra += (faults.slowest_nic - 1) * reduced
    seconds = plain.seconds + extra
    parts = SecondsByPart({**plain.parts, STRAGGLERS: extra}).taken()
    return replace(
        plain,
        seconds=seconds,
        parts=parts,
        bottleneck=parts.largest,
        mfu=plain.mfu * plain.seconds / seconds,
    )


def _factors(
    model: Model, cluster: Cluster, run: Settings, faults: Faults
) -> list[tuple[Group, float]]:
    """The groups to simulate, first one that no fault touches if there is one, and how many times
    as long the slowest rank of each computes what is no attention.

    Under jitter each product is drawn on each rank, and a layer waits for the slowest sum.
    """
    random = np.random.default_rng([faults.seed, 1 << 20])
    count = sum(1 for _ in products(model, run, model.parts[-1]))
    width = faults.jitter / math.sqrt(count)
    size = run.tp * run.cp
    drawn = 1.0
    if faults.jitter:
        drawn += width * float(random.standard_normal((SAMPLES, size)).max(axis=1).mean())
    found: list[tuple[Group, float]] = []
    usual = True
    for each in groups(run):
        if faults.slows(cluster, each.members(run)):
            found.append((each, drawn * float(faults.compute(each.members(run)).max())))
        elif usual:
            found.insert(0, (each, drawn))
            usual = False
    return found


def _layer(
    model: Model, cluster: Cluster, run: Settings, part: LayerPart | None, faults: Faults | None,
    group: Group | None, factor: float,
) -> LayerTime:  # fmt: skip
    """A layer on the ranks of one group, with everything that its slowest rank computes outside
    attention taking `factor` times as long."""
    plain = layer_time(model, cluster, run, faults, part, partial(attention_time, group=group),
                       wait=False)  # fmt: skip
    slowed = {
        name: SecondsByPart(
            {n: taken * (1 if n in COMMUNICATED else factor) for n, taken in parts.items()}
        )
        for name in ("forward", "recompute", "backward")
        for parts in [getattr(plain, name)]
    }
    return replace(plain, **slowed).waiting()


# --- stages --------------------------------------------------------------------------------------


class _Stage(NamedTuple):
    """Seconds of one micro-batch on one stage, and their standard deviation under jitter."""

    forward: float
    backward: float
    spread: float


def _stages(
    model: Model, cluster: Cluster, run: Settings, faults: Faults | None, group: Group | None,
    factor: float,
) -> list[_Stage]:  # fmt: skip
    """Every stage as it would be on the ranks of one group."""
    timed = cache(lambda part: _layer(model, cluster, run, part, faults, group, factor))
    found = []
    for index, (forward, backward) in enumerate(stages_of(model, cluster, run, timed)):
        forward_seconds, backward_seconds = (
            each.total + (factor - 1) * each[HEAD] for each in (forward, backward)
        )
        cores = (timed(part).core for part in parts_of(model, run, index))
        # Layers follow one another, so their deviations add up as those of independent draws do.
        spread = math.sqrt(sum(core.spread**2 for core in cores if core is not None))
        found.append(_Stage(forward_seconds, backward_seconds, spread))
    return found


def _longest(
    replicas: Sequence[Sequence[_Stage]], run: Settings, faults: Faults, draw: int
) -> float:
    """Seconds of the slowest replica's pipeline in one draw; equal ones are run once."""
    times: dict[object, float] = {}
    for dp, stages in enumerate(replicas):
        key = dp if faults.jitter else tuple(stages)
        if key not in times:
            random = np.random.default_rng([faults.seed, draw, dp])
            times[key] = _pipelined(stages, run, random)
    return max(times.values())


def _pipelined(
    stages: Sequence[_Stage], run: Settings, random: np.random.Generator | None = None
) -> float:
    """Seconds of all micro-batches; chunks of layers of a rank take equal shares of its stage."""
    shape = len(stages), run.micro_batches
    forward_seconds, backward_seconds, spread = (
        np.array(column)[:, None] for column in zip(*stages, strict=True)
    )
    drawn = np.ones(shape)
    if random is not None:
        drawn += spread / (forward_seconds + backward_seconds) * random.standard_normal(shape)
    forward, backward = (
        np.tile(each * np.maximum(drawn, 0.0) / run.vpp, (run.vpp, 1))
        for each in (forward_seconds, backward_seconds)
    )
    return pipeline_seconds(forward, backward, vpp=run.vpp)


Simulated = Literal["attention", "layer", "step"]


def simulate(
    model: str | Model,
    cluster: str | Path | Cluster,
    run: Settings,
    *,
    part: Simulated = "step",
    faults: Faults | None = None,
) -> Any:
    """Predict the time of a part of a run.

    model: a name, the path of a Hugging Face `config.json`, or `mb.Model`. cluster: the
    name of a GPU (as many as the run takes, 8 a node), the path of a cluster file, or `mb.Cluster`.
    part: "attention" (one call of one layer, forward and backward: `AttentionTime`), "layer" or
    "step". faults: what is slower than `cluster` says. Every result has `seconds`,
    `bottleneck` and `kernel`: the attention kernel whose published rate is assumed, None if the
    rate was measured or stated. Raises ValueError for settings that no run could have, and for a
    run that the cluster has too few GPUs for.
    """
    model = models.named(model) if isinstance(model, str) else model
    check(model, run)
    if not isinstance(cluster, Cluster):
        from_file = str(cluster).endswith(".toml")
        cluster = cluster_file.read(cluster) if from_file else Cluster(gpu(str(cluster)), run.gpus)
    _check_groups(cluster, run, faults)
    kernel = None if cluster.kernels_measured else assumed_kernel(cluster.gpu)
    return replace(_simulated(model, cluster, run, part, faults), kernel=kernel)


def _simulated(
    model: Model, cluster: Cluster, run: Settings, part: Simulated, faults: Faults | None
) -> AttentionTime | LayerTime | StepTime:
    if part == "attention":
        if run.by_kind:
            raise ValueError(
                f"window_algorithm {run.window_algorithm}, chunk_algorithm {run.chunk_algorithm}: "
                "part attention is one call: give its algorithm, and leave these out"
            )
        return attention_time(model, cluster, run, faults)
    if part == "layer":
        return (
            layer_under(model, cluster, run, faults) if faults else layer_time(model, cluster, run)
        )
    if part == "step":
        _check_turns(run)
        return step_under(model, cluster, run, faults) if faults else step_time(model, cluster, run)
    raise ValueError(f"part must be attention, layer or step, got {part!r}")


def _check_groups(cluster: Cluster, run: Settings, faults: Faults | None) -> None:
    """Raise ValueError where the run has more ranks than GPUs, or a fault is of a GPU without."""
    if run.gpus > cluster.gpus:
        raise ValueError(
            f"the run takes {run.gpus} GPUs (--tp {run.tp} x --cp {run.cp} x --pp {run.pp} x --dp "
            f"{run.dp}), the cluster has {cluster.gpus}: take smaller groups, or a cluster of "
            f"{run.gpus}"
        )
    if faults is not None:
        faults.check(cluster, run)


def _check_turns(run: Settings) -> None:
    """Raise ValueError where interleaved stages have no whole rounds of micro-batches."""
    if run.vpp > 1 and run.micro_batches % run.pp:
        near = -(-run.micro_batches // run.pp) * run.pp
        raise ValueError(
            f"--micro-batches {run.micro_batches}: with --vpp {run.vpp} Megatron needs a multiple "
            f"of --pp {run.pp}: take {near}, say"
        )

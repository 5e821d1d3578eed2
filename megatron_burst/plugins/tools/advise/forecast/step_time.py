# SPDX-License-Identifier: Apache-2.0
"""Predicted time of a training step by parts.

Pipeline stages process embedding, layers and LM head, micro-batch by micro-batch. Then gradients
are reduced and the optimizer updates parameters. `StepTime.parts` describes the busiest pipeline
stage. The time in which this stage waits is the pipeline bubble.

There are three kinds of data parallelism. Without sharding, gradients are all-reduced and every
rank updates all parameters. The distributed optimizer reduce-scatters gradients over data- and
context-parallel ranks, updates a shard and gathers parameters once per step (LoongTrain's hybrid
ZeRO). FSDP gathers a layer's parameters before forward and again before backward, and
reduce-scatters gradients, in every micro-batch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

from .....autotune.clusters import Cluster
from ..account.memory import parameters
from ..account.operators import B
from ..account.steps import parts_of
from ..settings import BYTES, Settings, check
from ..shapes.layer_kinds import SOFTMAX, LayerPart
from ..shapes.model import Model
from .attention_time import attention_time
from .layer_time import (
    LAUNCHES,
    MEMORY,
    LayerTime,
    Product,
    SecondsByPart,
    TimesAttention,
    layer_time,
    product_seconds,
    visible,
)
from .links import ring_seconds, send_seconds
from .scan_time import States, scan_seconds

GRADIENTS, GATHERING, OPTIMIZER = "gradient reduction", "parameter gathering", "optimizer"


def over_ranks(cluster: Cluster, run: Settings, dense: float, experts: float) -> float:
    """Return the seconds of an all-gather or reduce-scatter of all parameters of a rank.

    Args:
        cluster: Cluster of GPUs.
        run: Settings of the run.
        dense: Bytes of dense parameters, which data- and context-parallel ranks exchange.
        experts: Bytes of expert parameters, which ranks with the same experts exchange.
    """
    size = run.dp * run.cp
    dense_seconds = ring_seconds(cluster, size, run.tp, dense)
    return dense_seconds + ring_seconds(cluster, max(1, size // run.ep), run.tp * run.ep, experts)


def states_seconds(
    cluster: Cluster,
    run: Settings,
    rank_parameters: tuple[float, float],
    hiding: tuple[float, float],
) -> Mapping[str, float]:
    """Return the seconds per step of gradient reduction, parameter gathering and optimizer.

    Args:
        cluster: Cluster of GPUs.
        run: Settings of the run.
        rank_parameters: Dense and expert parameters of a rank, from `memory.parameters`.
        hiding: Seconds of forward and of backward of one micro-batch on this stage. At most the
            fraction `Cluster.overlap` of each transfer overlaps with them.
    """
    in_forward, in_backward = hiding
    gradients, gathered = (
        over_ranks(cluster, run, *(count * size for count in rank_parameters))
        for size in (BYTES[run.gradients], B)
    )

    def exposed(seconds: float, hiding: float) -> float:
        return seconds - min(cluster.overlap * seconds, hiding)

    optimizer = optimizer_seconds(cluster, run, rank_parameters)
    if run.fsdp:
        twice = exposed(gathered, in_forward) + exposed(gathered, in_backward)
        left = max(0.0, in_backward - cluster.overlap * gathered)
        reduced = run.micro_batches * exposed(gradients, left)
        return {GRADIENTS: reduced, GATHERING: run.micro_batches * twice, OPTIMIZER: optimizer}
    if not run.distributed_optimizer:  # an all-reduce is a reduce-scatter and an all-gather
        gradients, gathered = 2 * gradients, 0.0
    return {
        GRADIENTS: exposed(gradients, in_backward),
        GATHERING: exposed(gathered, in_forward),
        OPTIMIZER: optimizer,
    }


def optimizer_seconds(
    cluster: Cluster, run: Settings, rank_parameters: tuple[float, float]
) -> float:
    """Return the seconds of the optimizer's update.

    The update reads and writes optimizer states, reads gradients and writes parameters. For states
    in host memory, gradients are also copied to the host, and parameters are copied back.
    """
    dense, experts = rank_parameters
    size = run.dp * run.cp
    if run.distributed_optimizer or run.fsdp:
        dense, experts = dense / size, experts / max(1, size / run.ep)
    own = dense + experts
    update = own * (2 * run.optimizer_bytes + BYTES[run.gradients] + B)
    on_gpu = (1 - run.optimizer_offload) * update / cluster.gpu.memory_rate
    copied = run.optimizer_offload * own * (BYTES[run.gradients] + B) / cluster.link
    host = run.optimizer_offload * update * cluster.ranks_per_node / cluster.host_update
    return on_gpu + copied + host


HEAD, RECOMPUTE = "LM head and loss", "recompute"
BUBBLE, SENDS = "pipeline bubble", "pipeline sends"
# Bytes that the loss reads and writes per logit outside the matrix products. Fused ("single_pass",
# "recompute"): bf16 logits are read and their gradient is written in place. "recompute" reads them
# in one more pass. Separate ("off"): softmax, target and gradient each process fp32 copies.
LOSS_BYTES = {"single_pass": 6, "recompute": 8, "off": 24}
LOSS_PRODUCTS = {"single_pass": 3, "recompute": 4, "off": 3}


@dataclass(frozen=True)
class StepTime:
    """Predicted time of one step.

    Attributes:
        seconds: Seconds of the step.
        parts: Part -> seconds, on the busiest pipeline stage; the sum is `seconds`.
        bottleneck: Part with the most seconds, or `LAUNCHES`; see `SecondsByPart.largest`.
        tokens: Tokens of one step over all ranks.
        mfu: Model FLOPs utilization: model FLOPs (`model_operations`) of a step, divided by the
            FLOPs that all GPUs could execute in `seconds` at their peak rate.
        kernel: Attention kernel whose published rate is assumed, as in `AttentionTime`.
    """

    seconds: float
    parts: Mapping[str, float]
    bottleneck: str
    tokens: int
    mfu: float
    kernel: str | None = None

    def tokens_per_gpu(self, gpus: int) -> float:
        """Return tokens per second per GPU."""
        return self.tokens / self.seconds / gpus


class Stage(NamedTuple):
    """Seconds by part of one micro-batch on one pipeline stage; `backward` includes recompute."""

    forward: SecondsByPart
    backward: SecondsByPart

    @property
    def seconds(self) -> float:
        """Total seconds of forward and backward."""
        return self.forward.total + self.backward.total


def step_time(
    model: Model,
    cluster: Cluster,
    run: Settings,
    attention: TimesAttention = attention_time,
    states: States = scan_seconds,
    bound: bool = False,
) -> StepTime:
    """Return the time of one step of a run.

    Args:
        model: Shape of the model.
        cluster: Cluster of GPUs.
        run: Settings of the run.
        attention: Function that predicts the time of core attention; a search passes a cached one.
        states: Function that predicts the seconds in which ranks exchange states of one layer of
            linear attention.
        bound: Return a lower bound that also holds for runs with slower layers, in which another
            pipeline stage may be the busiest.

    Raises:
        ValueError: The settings are impossible.
    """
    check(model, run)
    layer = partial(layer_time, model, cluster, run, attention=attention, states=states)
    stages = stages_of(model, cluster, run, lambda part: layer(part=part))
    times = [stage.seconds for stage in stages]
    busiest = max(range(run.pp), key=times.__getitem__)
    stage = stages[busiest]
    parts = SecondsByPart()
    for stage_pass in stage:
        parts.add(stage_pass, run.micro_batches)
    parts[BUBBLE] = (sum(times) - times[busiest]) / run.vpp
    parts[SENDS] = send_time(model, cluster, run)
    hiding = stage.forward.total, stage.backward.total
    spent = states_seconds(cluster, run, parameters(model, run, busiest), hiding)
    if bound and run.pp > 1:
        others_parameters = (
            parameters(model, run, stage_pass)
            for stage_pass in range(run.pp)
            if stage_pass != busiest
        )
        hidden = (
            states_seconds(cluster, run, parameters_of_stage, (math.inf, math.inf))
            for parameters_of_stage in others_parameters
        )
        spent = min(spent, *hidden, key=lambda stage_pass: sum(stage_pass.values()))
    parts.add(spent)
    parts = parts.taken()
    seconds = parts.total
    tokens = run.seq * run.micro_batch * run.micro_batches * run.dp
    mfu = model_operations(model, run.seq) * tokens / (seconds * run.gpus * cluster.gpu.peak)
    return StepTime(seconds, parts, parts.largest, tokens, mfu)


def model_operations(model: Model, seq: int) -> float:
    """Return the model FLOPs per token in forward and backward, without recomputation.

    Each active parameter counts six FLOPs. The LM head is included, the embedding is not. Attention
    counts two matrix products over the visible keys (half of a causal sequence), times three for
    forward and backward. BurstEngine counts in the same way. Linear attention counts the
    recurrence: a state is written once and read once per token, or read twice with delta rules.

    Args:
        model: Shape of the model.
        seq: Tokens of a sequence.
    """
    widths = model.heads * (model.head_dim + model.value_dim)
    of = model.hybrid
    seen = sum(
        number * (of.seen(kind, seq) if of else visible(seq, model.window_of(kind, seq)))
        for kind in SOFTMAX
        if (number := model.number_of(kind))
    )
    states = 0
    if (mixer := model.mixer) is not None and mixer.form:
        states = model.mixers * (3 if mixer.delta else 2) * mixer.state
    return 6.0 * model.active_parameters + 6.0 * widths * seen + 6.0 * states


# --- stages --------------------------------------------------------------------------------------


def stages_of(
    model: Model, cluster: Cluster, run: Settings, layer: Callable[[LayerPart], LayerTime]
) -> list[Stage]:
    """Return the time of one micro-batch on each stage; `layer` predicts the time of one layer."""
    timed = cache(layer)
    return [_stage(model, cluster, run, index, timed) for index in range(run.pp)]


def _stage(
    model: Model, cluster: Cluster, run: Settings, index: int,
    layer: Callable[[LayerPart], LayerTime],
) -> Stage:  # fmt: skip
    """Return the time of one micro-batch on a stage.

    The first stage includes the embedding, the last stage the LM head.
    """
    forward = SecondsByPart()
    backward = SecondsByPart()
    kinds = Counter(parts_of(model, run, index))
    planning: dict[
        tuple[str | None, str | None], float
    ] = {}  # layers with the same kind of attention and algorithm share a plan
    for part, count in kinds.items():
        layer_seconds = layer(part)
        forward.add(layer_seconds.forward, count)
        backward.add(layer_seconds.backward, count)
        backward[RECOMPUTE] += count * layer_seconds.recompute.total
        planning.setdefault((part.attention, part.algorithm), layer_seconds.planning)
    forward[LAUNCHES] += sum(planning.values())
    if index == 0:
        moved = 3 * run.rows / run.tp * model.hidden * B / cluster.gpu.memory_rate
        forward[MEMORY] += moved
        backward[MEMORY] += moved
    if index == run.pp - 1:
        forward[HEAD], backward[HEAD] = head_seconds(model, cluster, run)
    return Stage(forward, backward)


def head_seconds(model: Model, cluster: Cluster, run: Settings) -> tuple[float, float]:
    """Return the seconds of forward and backward of the LM head and its loss.

    There are three matrix products, or four if logits are recomputed. With `single_pass` all
    products are in forward.
    """
    columns = max(1, model.vocabulary // run.tp)
    per_product = product_seconds(cluster.gpu, Product(run.rows, model.hidden, columns))
    loss = LOSS_BYTES[run.lm_head_loss] * run.rows * columns / cluster.gpu.memory_rate
    gathers = 3 * ring_seconds(cluster, run.tp, 1, run.rows * model.hidden * B)
    count = LOSS_PRODUCTS[run.lm_head_loss]
    first = count if run.lm_head_loss == "single_pass" else 1
    return first * per_product + loss, (count - first) * per_product + gathers


def send_time(model: Model, cluster: Cluster, run: Settings) -> float:
    """Return the seconds per step in which pipeline stages send activations and gradients.

    With 1F1B every micro-batch waits for its transfer. With interleaved stages, only micro-batches
    that fill or drain the pipeline wait.
    """
    if run.pp == 1:
        return 0.0
    stride = run.tp * run.cp * run.dp
    per_message = send_seconds(cluster, stride, run.rows / run.tp * model.hidden * B)
    times = run.micro_batches if run.vpp == 1 else 2 * (run.pp - 1)
    return 2 * times * per_message

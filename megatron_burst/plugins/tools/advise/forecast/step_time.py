# SPDX-License-Identifier: Apache-2.0
"""How long a training step takes, and what it spends its time on.

Layers and ends of the model run on pipeline stages, micro-batch by micro-batch; then gradients are
summed and the optimizer updates. The parts are those of the busiest stage; what it waits for is the
pipeline's bubble.

States cost time in one of three ways. The plain one sums all gradients on every rank and updates
all parameters there. The distributed optimizer scatters the sum over data- and context-parallel
ranks, updates a share and gathers parameters once a step (LoongTrain's hybrid ZeRO). FSDP gathers
every layer's parameters before its forward and again before its backward, and scatters its
gradients, in every micro-batch.
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
    """Seconds of one all-gather or reduce-scatter of these bytes over the ranks that share them."""
    size = run.dp * run.cp
    each = ring_seconds(cluster, size, run.tp, dense)
    return each + ring_seconds(cluster, max(1, size // run.ep), run.tp * run.ep, experts)


def states_seconds(
    cluster: Cluster, run: Settings, held: tuple[float, float], hiding: tuple[float, float]
) -> Mapping[str, float]:
    """Seconds by part that states cost a stage beyond computing, in one step.

    held: parameters of a rank, dense and of experts, as `memory.parameters` counts them. hiding:
    seconds of a micro-batch's forward and backward on this stage, which transfers run beside: a
    fraction `Cluster.overlap` of them at best.
    """
    in_forward, in_backward = hiding
    gradients, gathered = (
        over_ranks(cluster, run, *(each * size for each in held))
        for size in (BYTES[run.gradients], B)
    )

    def exposed(seconds: float, hiding: float) -> float:
        return seconds - min(cluster.overlap * seconds, hiding)

    optimizer = optimizer_seconds(cluster, run, held)
    if run.fsdp:
        twice = exposed(gathered, in_forward) + exposed(gathered, in_backward)
        left = max(0.0, in_backward - cluster.overlap * gathered)
        reduced = run.micro_batches * exposed(gradients, left)
        return {GRADIENTS: reduced, GATHERING: run.micro_batches * twice, OPTIMIZER: optimizer}
    if not run.distributed_optimizer:  # an all-reduce is both
        gradients, gathered = 2 * gradients, 0.0
    return {
        GRADIENTS: exposed(gradients, in_backward),
        GATHERING: exposed(gathered, in_forward),
        OPTIMIZER: optimizer,
    }


def optimizer_seconds(cluster: Cluster, run: Settings, held: tuple[float, float]) -> float:
    """Seconds of the update: states read and written, gradients read, parameters written. The part
    on the host: gradients go there and parameters come back besides, at the host's rates.
    """
    dense, experts = held
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
# Bytes that the loss reads and writes per logit besides the products: fused, bf16 logits are read
# and their gradient written in place, once or (recompute) with another pass before; apart, fp32
# copies of them go through softmax, target and gradient one by one.
LOSS_BYTES = {"single_pass": 6, "recompute": 8, "off": 24}
LOSS_PRODUCTS = {"single_pass": 3, "recompute": 4, "off": 3}


@dataclass(frozen=True)
class StepTime:
    """Predicted for one step. parts: seconds of the busiest rank by what it does, whose
    sum is `seconds`; bottleneck: the part to improve first; tokens: of one step, all ranks.
    mfu: operations of the model (`model_operations`) over those of the GPUs' peak in that time.
    kernel: same as in `AttentionTime`.
    """

    seconds: float
    parts: Mapping[str, float]
    bottleneck: str
    tokens: int
    mfu: float
    kernel: str | None = None

    def tokens_per_gpu(self, gpus: int) -> float:
        """Tokens per second and GPU."""
        return self.tokens / self.seconds / gpus


class Stage(NamedTuple):
    """Seconds by part of one micro-batch on one stage: forward, and backward with recompute."""

    forward: SecondsByPart
    backward: SecondsByPart

    @property
    def seconds(self) -> float:
        return self.forward.total + self.backward.total


def step_time(
    model: Model,
    cluster: Cluster,
    run: Settings,
    attention: TimesAttention = attention_time,
    states: States = scan_seconds,
    bound: bool = False,
) -> StepTime:
    """The time of one step of a run. attention: times the core attention of a
    layer, states: its exchange of states; a search gives ones that remember. bound: no time with
    longer layers is below it, where another stage may be the busiest, with fewer parameters.

    Raises ValueError for settings that no run could have.
    """
    check(model, run)
    layer = partial(layer_time, model, cluster, run, attention=attention, states=states)
    stages = stages_of(model, cluster, run, lambda part: layer(part=part))
    times = [stage.seconds for stage in stages]
    busiest = max(range(run.pp), key=times.__getitem__)
    stage = stages[busiest]
    parts = SecondsByPart()
    for each in stage:
        parts.add(each, run.micro_batches)
    parts[BUBBLE] = (sum(times) - times[busiest]) / run.vpp
    parts[SENDS] = send_time(model, cluster, run)
    hiding = stage.forward.total, stage.backward.total
    spent = states_seconds(cluster, run, parameters(model, run, busiest), hiding)
    if bound and run.pp > 1:
        others = (parameters(model, run, each) for each in range(run.pp) if each != busiest)
        hidden = (states_seconds(cluster, run, held, (math.inf, math.inf)) for held in others)
        spent = min(spent, *hidden, key=lambda each: sum(each.values()))
    parts.add(spent)
    parts = parts.taken()
    seconds = parts.total
    tokens = run.seq * run.micro_batch * run.micro_batches * run.dp
    mfu = model_operations(model, run.seq) * tokens / (seconds * run.gpus * cluster.gpu.peak)
    return StepTime(seconds, parts, parts.largest, tokens, mfu)


def model_operations(model: Model, seq: int) -> float:
    """Operations per token that the model needs: six per parameter that multiplies a token (the LM
    head, not the embedding) and three passes of attention's two products over the keys that it
    sees: of a causal sequence half. Nothing that is recomputed counts. BurstEngine counts so. Of
    linear attention the recurrence counts, whatever chunks it is computed in: a state written and
    read once per token, with delta rules read twice.
    """
    widths = model.heads * (model.head_dim + model.value_dim)
    seen = sum(model.number_of(kind) * visible(seq, model.window_of(kind, seq)) for kind in SOFTMAX)
    states = 0
    if (mixer := model.mixer) is not None and mixer.form:
        states = model.mixers * (3 if mixer.delta else 2) * mixer.state
    return 6.0 * model.active_parameters + 6.0 * widths * seen + 6.0 * states


# --- stages --------------------------------------------------------------------------------------


def stages_of(
    model: Model, cluster: Cluster, run: Settings, layer: Callable[[LayerPart], LayerTime]
) -> list[Stage]:
    """One micro-batch on every stage. layer: the time of a layer that is made of this."""
    timed = cache(layer)
    return [_stage(model, cluster, run, index, timed) for index in range(run.pp)]


def _stage(
    model: Model, cluster: Cluster, run: Settings, index: int,
    layer: Callable[[LayerPart], LayerTime],
) -> Stage:  # fmt: skip
    """One micro-batch on a stage: its layers, the embedding on the first, the head on the last."""
    forward = SecondsByPart()
    backward = SecondsByPart()
    kinds = Counter(parts_of(model, run, index))
    planning: dict[tuple[str | None, str | None], float] = {}  # layers of one attention share plans
    for part, count in kinds.items():
        one = layer(part)
        forward.add(one.forward, count)
        backward.add(one.backward, count)
        backward[RECOMPUTE] += count * one.recompute.total
        planning.setdefault((part.attention, part.algorithm), one.planning)
    forward[LAUNCHES] += sum(planning.values())
    if index == 0:
        moved = 3 * run.rows / run.tp * model.hidden * B / cluster.gpu.memory_rate
        forward[MEMORY] += moved
        backward[MEMORY] += moved
    if index == run.pp - 1:
        forward[HEAD], backward[HEAD] = head_seconds(model, cluster, run)
    return Stage(forward, backward)


def head_seconds(model: Model, cluster: Cluster, run: Settings) -> tuple[float, float]:
    """Forward and backward of the LM head and its loss: three products, four if logits are made
    again; with `single_pass` all of them are in forward.
    """
    columns = max(1, model.vocabulary // run.tp)
    each = product_seconds(cluster.gpu, Product(run.rows, model.hidden, columns))
    loss = LOSS_BYTES[run.lm_head_loss] * run.rows * columns / cluster.gpu.memory_rate
    gathers = 3 * ring_seconds(cluster, run.tp, 1, run.rows * model.hidden * B)
    count = LOSS_PRODUCTS[run.lm_head_loss]
    first = count if run.lm_head_loss == "single_pass" else 1
    return first * each + loss, (count - first) * each + gathers


def send_time(model: Model, cluster: Cluster, run: Settings) -> float:
    """Seconds of activations and their gradients between stages: every micro-batch waits for its
    own in 1F1B; interleaved, only those that fill and empty the pipeline do.
    """
    if run.pp == 1:
        return 0.0
    stride = run.tp * run.cp * run.dp
    each = send_seconds(cluster, stride, run.rows / run.tp * model.hidden * B)
    times = run.micro_batches if run.vpp == 1 else 2 * (run.pp - 1)
    return 2 * times * each

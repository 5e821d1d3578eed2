"""How long a training step takes, and what it spends its time on.

Layers and ends of the model run on pipeline stages, micro-batch by micro-batch; then gradients are
summed and the optimizer updates. The busiest stage is what the parts are of; what it waits for is
the pipeline's bubble. Decides nothing: `Settings` say what runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .attention_time import attention_time
from .clusters import Cluster
from .faults import Faults
from .layer import B
from .layer_time import MEMORY, Attention, LayerTime, Product, layer_time, product_seconds
from .links import ring_seconds, send_seconds
from .memory import parameters
from .models import Model
from .settings import Settings, check
from .states_time import states_seconds

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
    mfu: operations of the model (`model_operations`) over those of the GPUs' peak in that time."""

    seconds: float
    parts: Mapping[str, float]
    bottleneck: str
    tokens: int
    mfu: float

    def tokens_per_gpu(self, gpus: int) -> float:
        """Tokens per second and GPU."""
        return self.tokens / self.seconds / gpus


class Stage(NamedTuple):
    """Seconds by part of one micro-batch on one stage: forward, and backward with recompute."""

    forward: Counter[str]
    backward: Counter[str]

    @property
    def seconds(self) -> float:
        return self.forward.total() + self.backward.total()


def step_time(
    model: Model,
    cluster: Cluster,
    run: Settings,
    faults: Faults | None = None,
    attention: Attention = attention_time,
) -> StepTime:
    """The time of one step of a run. attention: times the core attention of a layer.

    Raises ValueError for settings that no run could have.
    """
    check(model, run)
    kinds = layers_by_kind(model, cluster, run, faults, attention)
    stages = [stage_of(model, cluster, run, index, kinds) for index in range(run.pp)]
    times = [stage.seconds for stage in stages]
    busiest = max(range(run.pp), key=times.__getitem__)
    stage = stages[busiest]
    parts: Counter[str] = Counter()
    for each in (stage.forward, stage.backward):
        parts.update({name: run.micro_batches * taken for name, taken in each.items()})
    parts[BUBBLE] = (sum(times) - times[busiest]) / run.vpp
    parts[SENDS] = send_time(model, cluster, run)
    hiding = stage.forward.total(), stage.backward.total()
    parts.update(states_seconds(cluster, run, parameters(model, run, busiest), hiding))
    parts = +parts
    seconds = parts.total()
    tokens = run.seq * run.micro_batch * run.micro_batches * run.dp
    mfu = model_operations(model, run.seq) * tokens / (seconds * run.gpus * cluster.gpu.peak)
    return StepTime(seconds, dict(parts), max(parts, key=parts.__getitem__), tokens, mfu)


def model_operations(model: Model, seq: int) -> float:
    """Operations per token that the model needs: six per parameter that multiplies a token (the LM
    head, not the embedding) and three passes of the causal half of attention's two products.
    Nothing that is recomputed counts. BurstEngine's tables count so."""
    attention = 6 * model.layers * model.heads * model.head_dim * seq
    return 6.0 * model.active_parameters + attention


# --- stages --------------------------------------------------------------------------------------


def layers_by_kind(
    model: Model,
    cluster: Cluster,
    run: Settings,
    faults: Faults | None = None,
    attention: Attention = attention_time,
) -> list[tuple[float, LayerTime]]:
    """How many layers of a stage are of each kind, and the time of one."""

    def timed(experts: bool | None) -> LayerTime:
        return layer_time(model, cluster, run, faults, experts, attention)

    share = 1 / run.pp
    if not model.experts:
        return [(model.layers * share, timed(None))]
    found = [(model.moe_layers * share, timed(True))]
    if model.layers > model.moe_layers:
        found.append(((model.layers - model.moe_layers) * share, timed(False)))
    return found


def stage_of(
    model: Model, cluster: Cluster, run: Settings, index: int, kinds: list[tuple[float, LayerTime]]
) -> Stage:
    """One micro-batch on a stage: its layers, the embedding on the first, the head on the last."""
    forward: Counter[str] = Counter()
    backward: Counter[str] = Counter()
    for count, layer in kinds:
        forward.update({name: count * taken for name, taken in layer.forward.items()})
        backward.update({name: count * taken for name, taken in layer.backward.items()})
        backward[RECOMPUTE] += count * sum(layer.recompute.values())
    if index == 0:
        moved = 3 * run.rows / run.tp * model.hidden * B / cluster.gpu.memory_rate
        forward[MEMORY] += moved
        backward[MEMORY] += moved
    if index == run.pp - 1:
        forward[HEAD], backward[HEAD] = head_seconds(model, cluster, run)
    return Stage(forward, backward)


def head_seconds(model: Model, cluster: Cluster, run: Settings) -> tuple[float, float]:
    """Forward and backward of the LM head and its loss: three products, four if logits are made
    again; with `single_pass` all of them are in forward."""
    columns = max(1, model.vocabulary // run.tp)
    each = product_seconds(cluster.gpu, Product(run.rows, model.hidden, columns))
    loss = LOSS_BYTES[run.lm_head_loss] * run.rows * columns / cluster.gpu.memory_rate
    gathers = 3 * ring_seconds(cluster, run.tp, 1, run.rows * model.hidden * B)
    count = LOSS_PRODUCTS[run.lm_head_loss]
    first = count if run.lm_head_loss == "single_pass" else 1
    return first * each + loss, (count - first) * each + gathers


def send_time(model: Model, cluster: Cluster, run: Settings) -> float:
    """Of activations and their gradients between stages: every micro-batch waits for its own in
    1F1B; interleaved, only those that fill and empty the pipeline do."""
    if run.pp == 1:
        return 0.0
    stride = run.tp * run.cp * run.dp
    each = send_seconds(cluster, stride, run.rows / run.tp * model.hidden * B)
    times = run.micro_batches if run.vpp == 1 else 2 * (run.pp - 1)
    return 2 * times * each

"""How long one transformer layer takes: forward, recompute and backward of one micro-batch.

What a rank does one after another: matrix products and what is bound by memory (`layer_work`),
core attention (`attention_time`), linear attention (`linear_work`, `scan_time`), collectives of
tensor- and expert-parallel ranks.
Copies to the host run beside them and cost what is left over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..account.layer import B, F, Sizes
from ..clusters import Cluster
from ..settings import Settings
from ..shapes.model import FULL, MIXER, WINDOW, Model, Part
from .attention_time import AttentionTime, attention_time
from .faults import Faults
from .layer_work import memory_bytes, product_seconds, products
from .linear_work import linear_seconds
from .links import all_to_all_seconds, ring_seconds
from .parts import Parts
from .scan_time import States, scan_seconds

ATTENTION, PRODUCTS, MEMORY = "attention", "linear layers", "norms, rope and activations"
LINEAR, STATES = "linear attention", "states between ranks"
TENSOR, EXPERTS, HOST = "tensor parallel", "expert exchange", "host link"
Attention = Callable[..., AttentionTime]  # called as `attention_time`


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer and micro-batch by part. recompute: the forward that backward runs
    again; backward: without it. core: of the core attention, None if the layer has none."""

    forward: Parts
    recompute: Parts
    backward: Parts
    core: AttentionTime | None = None

    @property
    def parts(self) -> Parts:
        """Of forward, recompute and backward together."""
        found = Parts()
        for each in (self.forward, self.recompute, self.backward):
            found.add(each)
        return found

    @property
    def seconds(self) -> float:
        return self.parts.total

    @property
    def bottleneck(self) -> str:
        """The part that takes most."""
        return self.parts.largest


def layer_time(
    model: Model,
    cluster: Cluster,
    run: Settings,
    faults: Faults | None = None,
    part: Part | None = None,
    attention: Attention = attention_time,
    states: States = scan_seconds,
) -> LayerTime:
    """The time of one layer.

    part: what it is made of, as `Model.parts` lists them; None: the last layer's. attention: times
    its core attention; states: times the exchange of states. A search gives ones that remember.
    """
    part = part or model.parts[-1]
    forward, backward, again = Parts(), Parts(), Parts()
    for product in products(model, run, part):
        taken = product_seconds(cluster.gpu, product) * product.times
        forward[PRODUCTS] += taken * (1 + product.again[0])
        backward[PRODUCTS] += taken * (2 + product.again[1])
    there, back = memory_bytes(model, run, part)
    forward[MEMORY] = there / cluster.gpu.memory_rate
    backward[MEMORY] = back / cluster.gpu.memory_rate
    collectives(model, cluster, run, part, forward, backward)
    if part.attention == MIXER:
        x = Sizes.of(model, run)
        if x.scan is not None:
            passed = run.cp > 1 and run.linear != "megatron"
            each = linear_seconds(cluster.gpu, x, x.scan, run.rows, passed)
            forward[LINEAR], backward[LINEAR] = each
            forward[STATES] = backward[STATES] = states(cluster, run, x)
    full = run.recompute == "full"
    if full:
        again.add(forward)
    core = None
    if part.attention in (FULL, WINDOW):
        core = attention(model, cluster, run, faults)
        if part.attention == WINDOW:
            core = windowed(core, model.window, run.seq)
        forward[ATTENTION], backward[ATTENTION] = core.forward, core.backward
        if full:
            again[ATTENTION] = recomputed_attention(core, run)
    copied = host_bytes(model, run, part) / cluster.link
    forward[HOST] = max(0.0, copied - forward.total)
    backward[HOST] = max(0.0, copied - backward.total - again.total)
    return LayerTime(forward.taken(), again.taken(), backward.taken(), core)


def collectives(
    model: Model, cluster: Cluster, run: Settings, part: Part, forward: Parts, backward: Parts
) -> None:
    """Add those of tensor- and of expert-parallel ranks.

    Rows are gathered before and scattered after each half; backward gathers them once more for the
    gradients of weights. All-to-alls bring rows to their experts and back.
    """
    rows = run.rows * model.hidden * B
    halves = (part.attention is not None) + part.mlp
    each = halves * ring_seconds(cluster, run.tp, 1, rows)
    forward[TENSOR], backward[TENSOR] = 2 * each, 3 * each
    if part.sparse:
        sent = rows / run.tp * model.top_k
        taken = 2 * all_to_all_seconds(cluster, run.ep, run.tp, sent)
        forward[EXPERTS] = backward[EXPERTS] = taken


def host_bytes(model: Model, run: Settings, part: Part) -> float:
    """Bytes of a layer's input and store that one rank copies to the host, and later back."""
    x = Sizes.of(model, run, part.sparse)
    out = 0.0 if part.attention in (None, MIXER) else run.rows * (x.out * B + x.heads * F)
    return run.offload * (run.rows / run.tp * model.hidden * B + run.store * out)


# --- parts of attention ------------------------------------------------------------------------


def windowed(core: AttentionTime, window: int, seq: int) -> AttentionTime:
    """Of a layer that sees a window, from the time of one that sees all: by its visible pairs. An
    estimate: the layout's imbalance and the keys that no longer travel are not followed."""
    share = visible(seq, window) / visible(seq)
    return replace(
        core, forward=core.forward * share, backward=core.backward * share,
        busy={name: share * taken for name, taken in core.busy.items()},
    )  # fmt: skip


def visible(seq: int, window: int = 0) -> float:
    """Keys that a query of a causal sequence sees on average; window: at most so many."""
    w = min(window or seq, seq)
    return w * (1 - (w - 1) / (2 * seq))


def recomputed_attention(core: AttentionTime, run: Settings) -> float:
    """Seconds of the attention that backward runs again: of the early rows that are not stored.

    Computing falls as the busiest rank's visible pairs do, transfers as the keys that travel do.
    """
    pairs = recomputed_pairs(run.layout, run.cp, run.store)
    return core.forward * (pairs if core.bottleneck == "compute" else 1 - run.store)


def recomputed_pairs(layout: str, cp: int, store: float) -> float:
    """Visible pairs of the early rows over those of all, of the busiest rank, causal.

    (1 - store)^2 where every rank has early rows in equal measure. With zigzag rank i has pieces i
    and 2 CP - 1 - i of 2 CP, and with contiguous piece i of CP: some have all their rows early
    (BurstEngine, section on sequence-level selective checkpointing).
    """
    left = 1 - store
    if layout not in ("zigzag", "contiguous"):
        return left**2
    pieces = 2 * cp if layout == "zigzag" else cp

    def early(piece: int) -> float:
        return max(0.0, min((piece + 1) / pieces, left) ** 2 - (piece / pieces) ** 2)

    if layout == "contiguous":
        return max(map(early, range(cp))) / (1 - (1 - 1 / cp) ** 2)
    return max(early(i) + early(pieces - 1 - i) for i in range(cp)) * cp

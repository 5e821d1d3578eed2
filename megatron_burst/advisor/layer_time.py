"""How long one transformer layer takes: forward, recompute and backward of one micro-batch.

Four kinds of work, one after another on a rank: matrix products (their operations over the rate
that products of this size reach), what is bound by memory (norms, rope, activation, residuals: their
bytes), the core attention (`attention_time`), and collectives of tensor- and expert-parallel ranks.
Copies to the host run beside them and cost what is left over.

Letters: R rows of a context-parallel rank, n = R / TP of them with sequence parallelism, h hidden.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .attention_time import AttentionTime, attention_time
from .clusters import Cluster, Gpu
from .faults import Faults
from .layer import B, F, Sizes
from .links import all_to_all_seconds, ring_seconds
from .models import Model
from .settings import Settings

ATTENTION, PRODUCTS, MEMORY = "attention", "linear layers", "norms, rope and activations"
TENSOR, EXPERTS, HOST = "tensor parallel", "expert exchange", "host link"
Parts = Counter[str]
Attention = Callable[..., AttentionTime]  # called as `attention_time`


class Product(NamedTuple):
    """A matrix product [rows, inner] x [inner, columns] of a layer, on one rank, `count` times.
    again: how many times more chunks or tiles run it in forward, and in backward."""

    rows: float
    inner: int
    columns: int
    count: float = 1.0
    again: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer and micro-batch by part. recompute: the forward that backward runs
    again; backward: without it."""

    forward: Mapping[str, float]
    recompute: Mapping[str, float]
    backward: Mapping[str, float]
    attention: AttentionTime

    @property
    def parts(self) -> Mapping[str, float]:
        """Of forward, recompute and backward together."""
        return Counter(self.forward) + Counter(self.recompute) + Counter(self.backward)

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def bottleneck(self) -> str:
        """The part that takes most."""
        parts = self.parts
        return max(parts, key=lambda name: parts[name])


def layer_time(
    model: Model,
    cluster: Cluster,
    run: Settings,
    faults: Faults | None = None,
    experts: bool | None = None,
    attention: Attention = attention_time,
) -> LayerTime:
    """The time of one layer. experts: whether it has them; None: if the model has any. attention:
    times its core attention; a search gives one that remembers."""
    sparse = bool(model.experts) if experts is None else experts
    core = attention(model, cluster, run, faults)
    forward, backward = Parts(), Parts()
    for product in products(model, run, sparse):
        taken = product_seconds(cluster.gpu, product) * product.count
        forward[PRODUCTS] += taken * (1 + product.again[0])
        backward[PRODUCTS] += taken * (2 + product.again[1])
    there, back = memory_bytes(model, run, sparse)
    forward[MEMORY] = there / cluster.gpu.memory_rate
    backward[MEMORY] = back / cluster.gpu.memory_rate
    tensor = tensor_seconds(model, cluster, run)
    forward[TENSOR], backward[TENSOR] = 4 * tensor, 6 * tensor
    if sparse:
        exchange = 2 * expert_seconds(model, cluster, run)
        forward[EXPERTS] = backward[EXPERTS] = exchange
    again = Parts(forward) if run.recompute == "full" else Parts()
    forward[ATTENTION], backward[ATTENTION] = core.forward, core.backward
    if run.recompute == "full":
        again[ATTENTION] = recomputed_attention(core, run)
    copied = host_bytes(model, run) / cluster.link
    forward[HOST] = max(0.0, copied - sum(forward.values()))
    backward[HOST] = max(0.0, copied - sum(backward.values()) - sum(again.values()))
    return LayerTime(+forward, +again, +backward, core)


# --- matrix products ---------------------------------------------------------------------------


def products(model: Model, run: Settings, sparse: bool = False) -> Iterator[Product]:
    """The products of a layer's forward on one rank; backward has two of each.

    Chunks of rows compute queries, keys and values twice in forward, and three times more in
    backward; tiles of rows compute the MLP once more in backward.
    """
    x = Sizes.of(model, run)
    chunks, tiles = run.sequence_chunks, run.mlp_tiles
    rows = run.rows / chunks
    cut = (1.0, 3.0) if chunks > 1 else (0.0, 0.0)
    yield Product(rows, x.hidden, x.query + x.kv, chunks, cut)
    yield Product(rows, x.query, x.hidden, chunks, (0.0, float(chunks > 1)))
    rows = run.rows / tiles
    tiled = (0.0, float(tiles > 1))
    wide = 2 if model.gated else 1
    widths = [(model.ffn, rows, tiles)]
    if sparse:
        yield Product(rows / run.tp, x.hidden, model.experts, tiles, tiled)  # the router
        here = model.experts // run.ep
        widths = [(model.ffn, rows * model.top_k * run.ep / model.experts, tiles * here)]
        widths += [(model.shared, rows, tiles)] * bool(model.shared)
    elif model.experts:
        widths = [(model.dense_ffn, rows, tiles)]
    for ffn, seen, count in widths:
        each = max(1, ffn // run.tp)
        yield Product(seen, x.hidden, wide * each, count, tiled)
        yield Product(seen, each, x.hidden, count, tiled)


def product_seconds(gpu: Gpu, product: Product) -> float:
    """Of one product: its operations at the rate of large ones, longer where a size is small; at
    least as long as memory takes for its three matrices."""
    m, k, n = product.rows, product.inner, product.columns
    lost = gpu.small * (1 / m + 1 / k + 1 / n)
    computing = 2 * m * k * n / (gpu.peak * gpu.linear) * (1 + lost)
    return max(computing, B * (m * k + k * n + m * n) / gpu.memory_rate)


# --- the rest ----------------------------------------------------------------------------------


def memory_bytes(model: Model, run: Settings, sparse: bool = False) -> tuple[float, float]:
    """Bytes that a forward and a backward of a layer read and write outside products and attention.

    Forward: norms and residuals read and write rows (2 + 3 per half), rope reads and writes queries
    and keys, the activation reads what it turns into a third (gated) or as many. Backward: the norm
    reads its input too; the activation reads its input and a gradient, and writes one.
    """
    x = Sizes.of(model, run)
    n = run.rows / run.tp
    turned = 2 * run.rows * (x.query + x.kv / 2)
    ffn = x.ffn if sparse or not model.experts else model.dense_ffn / run.tp
    wide, narrow = run.rows * ffn * (2 if model.gated else 1), run.rows * ffn
    copied = 4 * n * model.top_k * x.hidden if sparse else 0.0  # to experts and back
    there = 10 * n * x.hidden + turned + wide + narrow + copied
    back = 12 * n * x.hidden + turned + 2 * wide + narrow + copied
    return B * there, B * back


def tensor_seconds(model: Model, cluster: Cluster, run: Settings) -> float:
    """One gathering or scattering of rows over tensor-parallel ranks: forward has four, backward
    six, as rows are gathered again for the gradients of weights."""
    return ring_seconds(cluster, run.tp, 1, run.rows * model.hidden * B)


def expert_seconds(model: Model, cluster: Cluster, run: Settings) -> float:
    """One all-to-all that brings rows to their experts, or back."""
    sent = run.rows / run.tp * model.top_k * model.hidden * B
    return all_to_all_seconds(cluster, run.ep, run.tp, sent)


def host_bytes(model: Model, run: Settings) -> float:
    """Bytes of a layer's input and store that one rank copies to the host, and later back."""
    x = Sizes.of(model, run)
    out = run.rows * (x.query * B + x.heads * F)
    return run.offload * (run.rows / run.tp * model.hidden * B + run.store * out)


def recomputed_attention(core: AttentionTime, run: Settings) -> float:
    """Seconds of the attention that backward runs again: of the early rows that are not stored.

    Computing falls as the busiest rank's visible pairs do, transfers as the keys that travel do.
    """
    left = 1 - run.store
    pairs = recomputed_pairs(run.layout, run.cp, run.store)
    return core.forward * (pairs if core.bottleneck == "compute" else left)


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

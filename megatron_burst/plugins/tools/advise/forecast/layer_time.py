# SPDX-License-Identifier: Apache-2.0
"""Predicted time of one transformer layer: forward, recompute and backward of one micro-batch.

The times of these operations are added: matrix products, memory-bound operators, core attention
(`attention_time`), linear attention (`scan_time`), and collectives of tensor- and expert-parallel
ranks. Copies to the host overlap with these operations; only the excess time of longer copies is
added. Kernel launches overlap in the same way within a layer, because the launch queue of a GPU
holds the kernels of about one layer.

There are no published times of linear attention kernels. Their predicted time is the larger of two
times: of memory traffic, and of the matrix products of chunks of `CHUNK` rows at the rate of large
products. This is a lower bound, because products of 64 rows do not reach this rate. Sources: the
chunkwise forms of Mamba-2's SSD (arXiv 2405.21060, section 6) and of delta rules (2412.06464,
section 3).

`Settings.rows` is the number of rows of a context-parallel rank. n = rows / TP is the number of
rows of a tensor-parallel rank with sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from .....autotune.clusters import Cluster
from .....autotune.gpus import Gpu
from ..account.operators import CHUNK, B, F, LayerSizes, chunk_states
from ..account.steps import parts_of, visiting_bytes
from ..settings import Settings
from ..shapes.layer_kinds import HYBRID, MIXER, SOFTMAX, LayerPart, Mixer
from ..shapes.model import Model
from .attention_time import AttentionTime, attention_time
from .links import all_to_all_seconds, ring_seconds
from .scan_time import States, scan_seconds


class SecondsByPart(dict[str, float]):
    """Dict from a part of the step (such as "attention") to seconds; absent parts count as 0 s."""

    def __missing__(self, name: str) -> float:
        return 0.0

    def add(self, parts: Mapping[str, float], times: float = 1.0) -> None:
        """Add `parts`, multiplied by `times`."""
        for name, seconds in parts.items():
            self[name] += times * seconds

    @property
    def total(self) -> float:
        """Total seconds of all parts."""
        return sum(self.values())

    @property
    def largest(self) -> str:
        """Part with the most seconds; "" if there are no parts.

        It is `LAUNCHES` if waiting for kernel launches takes more than the fraction `LITTLE` of the
        total, because then only fewer launches shorten the layer.
        """
        if self[LAUNCHES] > LITTLE * self.total:
            return LAUNCHES
        return max(self, key=self.__getitem__, default="")

    def taken(self) -> SecondsByPart:
        """Return the parts with more than 0 s."""
        return SecondsByPart({name: seconds for name, seconds in self.items() if seconds > 0})


class Product(NamedTuple):
    """Matrix product [rows, inner] x [inner, columns] in a layer on one rank.

    Attributes:
        rows: Rows of the result.
        inner: Dimension over which the product sums.
        columns: Columns of the result.
        times: Number of products of this shape.
        repeats: Number of additional executions of all these products, in forward and in backward.
            Row chunks and tiles cause them.
    """

    rows: float
    inner: int
    columns: int
    times: float = 1.0
    repeats: tuple[float, float] = (0.0, 0.0)


def products(model: Model, run: Settings, part: LayerPart) -> Iterator[Product]:
    """Yield the matrix products in forward of a layer on one rank.

    Backward has two products for each product of forward. With row chunks, the projections to q, k
    and v run twice in forward and three more times in backward. With row chunks the output
    projection, and with MLP tiles the products of the MLP, run once more in backward.
    """
    x = LayerSizes.of(model, run, part.sparse)
    if part.attention == MIXER:
        assert x.mixer is not None
        yield Product(run.rows, x.hidden, x.mixer.into)
        yield Product(run.rows, x.mixer.out, x.hidden)
    elif part.attention in HYBRID:
        yield from _hybrid_projections(x, run, part.attention)
    elif part.attention is not None:
        yield from _projections(model, x, run)
    if part.mlp:
        yield from _mlp(model, x, run, part.sparse)


def _projections(model: Model, x: LayerSizes, run: Settings) -> Iterator[Product]:
    if (index := model.indexer) is not None:  # every tensor-parallel rank computes it for all rows
        from_rank = model.latent.q_rank if model.latent else 0
        yield Product(run.rows, from_rank or x.hidden, index.heads * index.width)
        yield Product(run.rows, x.hidden, index.width + index.heads)
    chunks = run.sequence_chunks
    rows = run.rows / chunks
    cut = (1.0, 3.0) if chunks > 1 else (0.0, 0.0)
    if low := model.latent:
        n = rows / run.tp  # every tensor-parallel rank computes the latents of its share of rows
        yield Product(n, x.hidden, x.latent, chunks, cut)
        if low.q_rank:
            yield Product(rows, low.q_rank, x.query, chunks, cut)
        else:
            yield Product(rows, x.hidden, x.query, chunks, cut)
        yield Product(rows, low.kv_rank, x.up, chunks, cut)
    else:
        yield Product(rows, x.hidden, x.query * (1 + x.gate) + x.kv, chunks, cut)
    yield Product(rows, x.out, x.hidden, chunks, (0.0, float(chunks > 1)))


def _hybrid_projections(x: LayerSizes, run: Settings, kind: str | None) -> Iterator[Product]:
    """Yield the projections of hybrid attention.

    Only queries and outputs are split over tensor-parallel ranks.
    """
    of, rows = x.hybrid, run.rows
    assert of is not None
    yield Product(rows, x.hidden, of.q_rank)
    yield Product(rows, x.hidden, x.width)
    yield Product(rows, of.q_rank, x.query)
    for columns in of.compressors(kind, x.width):
        yield Product(rows, x.hidden, columns, 2)
    if (index := of.index_of(kind)) is not None:
        yield Product(rows, of.q_rank, index.heads * index.width)
        yield Product(rows, x.hidden, index.heads)
    yield Product(rows, x.out // (of.groups // x.tp), of.out_rank, of.groups / x.tp)
    yield Product(rows, of.groups * of.out_rank // x.tp, x.hidden)


def _mlp(model: Model, x: LayerSizes, run: Settings, sparse: bool) -> Iterator[Product]:
    tiles = run.mlp_tiles
    rows, tiled = run.rows / tiles, (0.0, float(tiles > 1))
    widths = [(x.ffn * run.tp, rows, tiles)]
    if sparse:
        yield Product(rows / run.tp, x.hidden, model.experts, tiles, tiled)  # the router
        here = model.experts // run.ep
        widths = [(model.ffn, rows * model.top_k * run.ep / model.experts, tiles * here)]
        if model.shared:
            widths.append((model.shared, rows, tiles))
    for ffn, seen, count in widths:
        width = max(1, ffn // run.tp)
        yield Product(seen, x.hidden, width * (2 if x.gated else 1), count, tiled)
        yield Product(seen, width, x.hidden, count, tiled)


def product_seconds(gpu: Gpu, product: Product) -> float:
    """Return the seconds of one matrix product on a GPU.

    The rate is the rate of large products, reduced if a dimension is small. The time is at least
    the time for reading and writing the three matrices.
    """
    m, k, n = product.rows, product.inner, product.columns
    lost = gpu.small * (1 / m + 1 / k + 1 / n)
    computing = 2 * m * k * n / (gpu.peak * gpu.linear) * (1 + lost)
    return max(computing, B * (m * k + k * n + m * n) / gpu.memory_rate)


def memory_bytes(model: Model, run: Settings, part: LayerPart) -> tuple[float, float]:
    """Return the bytes that one rank reads and writes in memory-bound operators of a layer.

    These are all operators except matrix products and attention. Forward: a norm reads and writes
    hidden states. A residual reads two and writes one. Rope reads and writes queries and keys. The
    activation reads its input, and writes half as much if it is gated, otherwise as much. With
    experts, rows are copied to the experts and back. In layers with linear attention, the
    convolution and the norm of keys read and write their rows, and the gated norm reads the result
    and a gate. Backward reads gradients and saved inputs, and writes a gradient for each input.

    Returns:
        Bytes in forward, and bytes in backward.
    """
    x = LayerSizes.of(model, run, part.sparse)
    n = run.rows / run.tp
    halves = (part.attention is not None) + part.mlp
    forward, backward = 5.0 * halves * n * x.hidden, 6.0 * halves * n * x.hidden
    if part.attention not in (None, MIXER):
        forward += 2 * run.rows * (x.query + x.keys)
        backward += 2 * run.rows * (x.query + x.keys)
    if x.hybrid is not None:  # `mb.compress`: rows, gates, and both again in fp32
        compressed = run.rows * sum(x.hybrid.compressors(part.attention, x.width))
        forward += 2 * compressed * (1 + F / B)
        backward += 4 * compressed * (1 + F / B)
    if part.attention == MIXER and (scan := x.scan) is not None:
        convolved = scan.convolved * (scan.taps > 0) + scan.keys * scan.delta
        forward += run.rows * (2.0 * convolved + 3 * scan.values)
        backward += run.rows * (3.0 * convolved + 5 * scan.values)
    if part.mlp:
        narrow = run.rows * x.ffn
        wide = narrow * (2 if x.gated else 1)
        forward += wide + narrow
        backward += 2 * wide + narrow
    if part.sparse:
        forward += 4 * n * model.top_k * x.hidden
        backward += 4 * n * model.top_k * x.hidden
    return B * forward, B * backward


# FLOPs of linear-attention backward divided by FLOPs of forward. Backward recomputes chunks, and it
# has two products for each product of forward.
BACKWARD = 3


def output_operations(scan: Mixer, rows: int) -> float:
    """Return the FLOPs of a linear-attention layer's forward after ranks have exchanged states.

    They are summed over all heads. For each row they are: the query times the keys of the chunk,
    the result times the values of the chunk, reading the state, and writing the state. Delta rules
    add: the key times the keys of the chunk, the solution of a triangular system (c^2 / 3 per row
    for chunks of c rows), products of the solution with keys and values, and reading the state for
    the key.
    """
    c, d, w = CHUNK, scan.width, scan.value_width
    per_row = 2 * c * (d + w) + 4 * d * w
    if scan.delta:
        per_row += 4 * c * d + 2 * c * w + c * c / 3 + 2 * d * w
    return float(rows * scan.heads * per_row)


def state_operations(scan: Mixer, rows: int) -> float:
    """Return the FLOPs of a linear-attention layer's forward before ranks exchange states.

    They are summed over all heads. A rank computes the function from the state before its rows to
    the state after its rows (the map). Without delta rules it only writes the state. With delta
    rules it computes the recurrence of a state with d + w columns instead of w, for key width d and
    value width w.
    """
    c, d, w = CHUNK, scan.width, scan.value_width
    per_row = 2.0 * d * w
    if scan.delta:
        per_row = 2 * c * d + c * c / 3 + 2 * c * (d + w) + 4 * d * (d + w)
    return rows * scan.heads * per_row


def memory_traffic(x: LayerSizes, scan: Mixer, rows: int) -> float:
    """Return the bytes that one pass of linear attention over a rank's rows reads and writes.

    A pass computes either the outputs or the states that are sent. The bytes are the arguments,
    the results, and the states of chunks, which are written and read.
    """
    arguments = scan.convolved * B + (scan.decays + scan.heads * scan.delta) * F
    return rows * (arguments + scan.values * B) + 2 * chunk_states(x, scan, rows)


def linear_seconds(
    gpu: Gpu, x: LayerSizes, scan: Mixer, rows: int, scanned: bool
) -> tuple[float, float]:
    """Return the seconds of linear attention in forward and in backward, without communication.

    If ranks exchange states (`scanned`), the time includes computing the states to send.
    """
    computed = output_operations(scan, rows) + scanned * state_operations(scan, rows)
    read = (1 + scanned) * memory_traffic(x, scan, rows)
    forward = max(computed / (gpu.peak * gpu.linear), read / gpu.memory_rate)
    return forward, BACKWARD * forward


ATTENTION, PRODUCTS, MEMORY = "attention", "linear layers", "norms, rope and activations"
LINEAR, STATES = "linear attention", "states between ranks"
TENSOR, EXPERTS, HOST = "tensor parallel", "expert exchange", "host link"
# Part of a layer, and the fraction of the total above which this part is the bottleneck.
LAUNCHES, LITTLE = "waiting for launches", 0.05
TimesAttention = Callable[..., AttentionTime]  # called as `attention_time`


@dataclass(frozen=True)
class LayerTime:
    """Predicted seconds of one layer and one micro-batch, by part (such as "attention").

    Attributes:
        forward: Seconds of forward.
        recompute: Seconds of forward operations that are repeated in backward.
        backward: Seconds of backward without recompute.
        core: Time of core attention; None if the layer has none.
        launching: CPU seconds spent launching kernels: in forward, and in recompute and backward
            together.
        kernel: Attention kernel whose published rate is assumed, as in `AttentionTime`.
    """

    forward: SecondsByPart
    recompute: SecondsByPart
    backward: SecondsByPart
    core: AttentionTime | None = None
    launching: tuple[float, float] = (0.0, 0.0)
    kernel: str | None = None

    def waiting(self) -> LayerTime:
        """Return a copy that includes the seconds in which the GPU waits for kernel launches.

        They are added as the part `LAUNCHES`, so this method may be called only once.
        """
        forward, backward = SecondsByPart(self.forward), SecondsByPart(self.backward)
        first, second = self.launching
        forward[LAUNCHES] = max(0.0, first - forward.total)
        backward[LAUNCHES] = max(0.0, second - backward.total - self.recompute.total)
        return replace(self, forward=forward.taken(), backward=backward.taken())

    @property
    def planning(self) -> float:
        """Seconds by which planning of attention delays the first layer of a micro-batch.

        The CPU plans before it launches kernels.
        """
        needed = self.launching[0] + (self.core.planning if self.core else 0.0)
        return max(0.0, needed - self.forward.total)

    @property
    def parts(self) -> SecondsByPart:
        """Seconds by part, for forward, recompute and backward together."""
        total = SecondsByPart()
        for part_seconds in (self.forward, self.recompute, self.backward):
            total.add(part_seconds)
        return total

    @property
    def seconds(self) -> float:
        """Total seconds of all parts."""
        return self.parts.total

    @property
    def bottleneck(self) -> str:
        """Part with the most seconds, or `LAUNCHES`; see `SecondsByPart.largest`."""
        return self.parts.largest


def layer_time(
    model: Model,
    cluster: Cluster,
    run: Settings,
    part: LayerPart | None = None,
    attention: TimesAttention = attention_time,
    states: States = scan_seconds,
) -> LayerTime:
    """Return the time of one layer.

    Args:
        model: Shape of the model.
        cluster: Cluster of GPUs.
        run: Settings of the run.
        part: Layer from `parts_of`; None for the last layer of the model.
        attention: Function that predicts the time of core attention; a search passes a cached one.
        states: Function that predicts the seconds in which ranks exchange states of linear
            attention.
    """
    part = part or parts_of(model, run, run.pp - 1)[-1]
    forward, backward, recompute = SecondsByPart(), SecondsByPart(), SecondsByPart()
    for product in products(model, run, part):
        taken = product_seconds(cluster.gpu, product) * product.times
        forward[PRODUCTS] += taken * (1 + product.repeats[0])
        backward[PRODUCTS] += taken * (2 + product.repeats[1])
    in_forward, in_backward = memory_bytes(model, run, part)
    forward[MEMORY] = in_forward / cluster.gpu.memory_rate
    backward[MEMORY] = in_backward / cluster.gpu.memory_rate
    collectives(model, cluster, run, part, forward, backward)
    if part.attention == MIXER:
        x = LayerSizes.of(model, run)
        if x.scan is not None:
            passed = run.cp > 1 and run.linear != "megatron"
            linear_passes = linear_seconds(cluster.gpu, x, x.scan, run.rows, passed)
            forward[LINEAR], backward[LINEAR] = linear_passes
            forward[STATES] = backward[STATES] = states(cluster, run, x)
    full = run.recompute == "full"
    if full:
        recompute.add(forward)
    core = None
    if part.attention in SOFTMAX:
        window = model.window_of(part.attention, run.seq)
        own = replace(run, algorithm=part.algorithm) if part.algorithm else run
        of_kind = {} if model.hybrid is None else {"kind": part.attention}
        core = attention(model, cluster, own, window=window, **of_kind)
        forward[ATTENTION], backward[ATTENTION] = core.forward, core.backward
        if full:
            recompute[ATTENTION] = recomputed_attention(core, run)
    copied = host_bytes(model, run, part) / cluster.link
    keys = visiting_bytes(model, run, part) / cluster.link
    forward[HOST] = max(0.0, copied + keys - forward.total)
    backward[HOST] = max(0.0, copied - backward.total - recompute.total)
    result = LayerTime(
        forward.taken(),
        recompute.taken(),
        backward.taken(),
        core,
        launching(cluster, run, part, core),
    )
    return result.waiting()


def launching(
    cluster: Cluster, run: Settings, part: LayerPart, core: AttentionTime | None
) -> tuple[float, float]:
    """Return the CPU seconds spent launching a layer's kernels, in forward and in backward.

    Backward includes the recomputation. Each row chunk launches all kernels of the attention half
    except core attention. Each tile launches all kernels of the MLP half.
    """
    pieces = run.sequence_chunks * (part.attention is not None) + run.mlp_tiles * part.mlp
    launches, (forward, backward) = (
        cluster.host_time.layer / 2 * pieces,
        core.host if core else (0, 0),
    )
    recompute = 0.0
    if run.recompute == "full":
        recompute = launches + forward * (run.store < 1)
    return launches + forward, launches + backward + recompute


def collectives(
    model: Model,
    cluster: Cluster,
    run: Settings,
    part: LayerPart,
    forward: SecondsByPart,
    backward: SecondsByPart,
) -> None:
    """Add the seconds of tensor- and expert-parallel collectives to `forward` and `backward`.

    With sequence parallelism, rows are gathered before the attention half and the MLP half of a
    layer, and reduce-scattered after them. Backward gathers rows once more for weight gradients.
    All-to-alls send rows to experts and back.
    """
    rows = run.rows * model.hidden * B
    halves = (part.attention is not None) + part.mlp
    gather = halves * ring_seconds(cluster, run.tp, 1, rows)
    forward[TENSOR], backward[TENSOR] = 2 * gather, 3 * gather
    if part.sparse:
        sent = rows / run.tp * model.top_k
        taken = 2 * all_to_all_seconds(cluster, run.ep, run.tp, sent)
        forward[EXPERTS] = backward[EXPERTS] = taken


def host_bytes(model: Model, run: Settings, part: LayerPart) -> float:
    """Return the bytes that one rank copies to the host for a layer.

    These are the offloaded fractions of the layer's input and of its attention store.
    """
    x = LayerSizes.of(model, run, part.sparse)
    out = 0.0 if part.attention in (None, MIXER) else run.rows * (x.out * B + x.heads * F)
    return run.offload * (run.rows / run.tp * model.hidden * B + run.store * out)


# --- parts of attention ------------------------------------------------------------------------


def visible(seq: int, window: int = 0) -> float:
    """Return the average number of keys that a query of a causal sequence attends to.

    Args:
        seq: Tokens of the sequence.
        window: Maximum number of keys (sliding window); 0 for no limit.
    """
    w = min(window or seq, seq)
    return w * (1 - (w - 1) / (2 * seq))


def recomputed_attention(core: AttentionTime, run: Settings) -> float:
    """Return the seconds in which backward recomputes the attention of rows that are not stored.

    The attention store has the results of the last rows. Compute time is proportional to the
    visible pairs of the busiest rank, and transfer time to the number of keys.
    """
    pairs = recomputed_pairs(run.layout, run.cp, run.store)
    return core.forward * (pairs if core.bottleneck == "compute" else 1 - run.store)


def recomputed_pairs(layout: str, cp: int, store: float) -> float:
    """Return the fraction of the busiest rank's visible pairs that backward computes again.

    Backward recomputes the first (1 - store) of all rows. If all ranks have equally many of these
    rows, the fraction is (1 - store)^2. It is larger with zigzag and contiguous, which give more
    early rows to some ranks. Source: BurstEngine, section on sequence-level selective
    checkpointing.

    Args:
        layout: Name of the layout.
        cp: Number of context-parallel ranks.
        store: Fraction of the rows whose attention outputs are stored.
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

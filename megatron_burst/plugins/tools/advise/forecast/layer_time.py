# SPDX-License-Identifier: Apache-2.0
"""How long one transformer layer takes: forward, recompute and backward of one micro-batch.

A rank does one after another: matrix products and what is bound by memory, core attention
(`attention_time`), linear attention and its exchange of states (`scan_time`), collectives of
tensor- and expert-parallel ranks. Copies to the host run beside them and cost what is left over, as
does launching all that: of each layer, as a GPU's queue of launches is not much longer than one.

Linear attention, of which no table was published, counts products of chunks of `CHUNK` rows at the
rate of large matrix products, or memory where that takes longer. That is a lower bound, not fitted:
products of 64 rows do not reach that rate. Sources: the chunkwise forms of Mamba-2's SSD
(arXiv 2405.21060, section 6) and of delta rules (2412.06464, section 3).

Letters: R rows of a context-parallel rank, n = R / TP of them with sequence parallelism, h hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from .....autotune.clusters import Cluster
from .....autotune.gpus import Gpu
from ..account.operators import CHUNK, B, F, LayerSizes, chunk_states
from ..account.rings import on_ring, visiting_rows
from ..account.steps import parts_of
from ..settings import Settings
from ..shapes.layer_kinds import MIXER, SOFTMAX, LayerPart, Mixer
from ..shapes.model import Model
from .attention_time import AttentionTime, attention_time
from .links import all_to_all_seconds, ring_seconds
from .scan_time import States, scan_seconds


class SecondsByPart(dict[str, float]):
    """Part -> seconds; what was never added takes none."""

    def __missing__(self, name: str) -> float:
        return 0.0

    def add(self, others: Mapping[str, float], times: float = 1.0) -> None:
        """Add others' parts, each so many times."""
        for name, seconds in others.items():
            self[name] += times * seconds

    @property
    def total(self) -> float:
        """Seconds of all parts."""
        return sum(self.values())

    @property
    def largest(self) -> str:
        """The part that takes most; "" where there is none. Waiting for launches, where it is more
        than a little: nothing else shortens layers that wait.
        """
        if self[LAUNCHES] > LITTLE * self.total:
            return LAUNCHES
        return max(self, key=self.__getitem__, default="")

    def taken(self) -> SecondsByPart:
        """Without the parts that take no time."""
        return SecondsByPart({name: seconds for name, seconds in self.items() if seconds > 0})


class Product(NamedTuple):
    """A matrix product [rows, inner] x [inner, columns] of a layer, on one rank, `times` over.
    again: how many times more chunks or tiles run it in forward, and in backward.
    """

    rows: float
    inner: int
    columns: int
    times: float = 1.0
    again: tuple[float, float] = (0.0, 0.0)


def products(model: Model, run: Settings, part: LayerPart) -> Iterator[Product]:
    """The products of a layer's forward on one rank; backward has two of each.

    Chunks of rows compute queries, keys and values twice in forward and three times more in
    backward, and what follows once more in backward, as tiles of rows do with the MLP.
    """
    x = LayerSizes.of(model, run, part.sparse)
    if part.attention == MIXER:
        assert x.mixer is not None
        yield Product(run.rows, x.hidden, x.mixer.into)
        yield Product(run.rows, x.mixer.out, x.hidden)
    elif part.attention is not None:
        yield from _projections(model, x, run)
    if part.mlp:
        yield from _mlp(model, x, run, part.sparse)


def _projections(model: Model, x: LayerSizes, run: Settings) -> Iterator[Product]:
    if (index := model.indexer) is not None:  # whole on every tensor-parallel rank, for all rows
        from_rank = model.latent.q_rank if model.latent else 0
        yield Product(run.rows, from_rank or x.hidden, index.heads * index.width)
        yield Product(run.rows, x.hidden, index.width + index.heads)
    chunks = run.sequence_chunks
    rows = run.rows / chunks
    cut = (1.0, 3.0) if chunks > 1 else (0.0, 0.0)
    if low := model.latent:
        n = rows / run.tp  # the narrow part is whole on every rank, for its share of rows
        yield Product(n, x.hidden, x.latent, chunks, cut)
        if low.q_rank:
            yield Product(rows, low.q_rank, x.query, chunks, cut)
        else:
            yield Product(rows, x.hidden, x.query, chunks, cut)
        yield Product(rows, low.kv_rank, x.up, chunks, cut)
    else:
        yield Product(rows, x.hidden, x.query * (1 + x.gate) + x.kv, chunks, cut)
    yield Product(rows, x.out, x.hidden, chunks, (0.0, float(chunks > 1)))


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
        each = max(1, ffn // run.tp)
        yield Product(seen, x.hidden, each * (2 if x.gated else 1), count, tiled)
        yield Product(seen, each, x.hidden, count, tiled)


def product_seconds(gpu: Gpu, product: Product) -> float:
    """Seconds of one product: its operations at the rate of large ones, longer where a size is
    small; at least as long as memory takes for its three matrices.
    """
    m, k, n = product.rows, product.inner, product.columns
    lost = gpu.small * (1 / m + 1 / k + 1 / n)
    computing = 2 * m * k * n / (gpu.peak * gpu.linear) * (1 + lost)
    return max(computing, B * (m * k + k * n + m * n) / gpu.memory_rate)


def memory_bytes(model: Model, run: Settings, part: LayerPart) -> tuple[float, float]:
    """Bytes that a forward and a backward of a layer read and write outside products and attention.

    Norms read and write rows, and residuals read two and write one, in each half; rope reads and
    writes queries and keys; the activation reads what it turns into half as much (gated) or as
    much. Backward: the norm reads its input too; the activation reads its input and a gradient, and
    writes one. Rows are copied to experts and back. Of linear attention what is around it: the
    convolution and the norm of keys read and write rows, the gated norm reads results and a gate;
    backward reads gradients too and writes those of all that was read.
    """
    x = LayerSizes.of(model, run, part.sparse)
    n = run.rows / run.tp
    halves = (part.attention is not None) + part.mlp
    forward, backward = 5.0 * halves * n * x.hidden, 6.0 * halves * n * x.hidden
    if part.attention not in (None, MIXER):
        forward += 2 * run.rows * (x.query + x.keys)
        backward += 2 * run.rows * (x.query + x.keys)
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


# Backward makes what is inside of chunks again, and has two products for each of forward's.
BACKWARD = 3


def answers(scan: Mixer, rows: int) -> float:
    """Operations of a forward that knows the states that enter, over all heads.

    Per row: its chunk's keys times its query, the chunk's values times that, the state read, and
    written. Delta rules: the keys times its own key, the solution of the chunk's triangle (a third
    of its square), what that makes of keys and of values, and the state read for the key as well.
    """
    c, d, w = CHUNK, scan.width, scan.value_width
    each = 2 * c * (d + w) + 4 * d * w
    if scan.delta:
        each += 4 * c * d + 2 * c * w + c * c / 3 + 2 * d * w
    return float(rows * scan.heads * each)


def maps(scan: Mixer, rows: int) -> float:
    """Operations of what rows do to any state, which a scan needs first, over all heads: the state
    written; with delta rules the same recurrence of d + w columns instead of w.
    """
    c, d, w = CHUNK, scan.width, scan.value_width
    each = 2.0 * d * w
    if scan.delta:
        each = 2 * c * d + c * c / 3 + 2 * c * (d + w) + 4 * d * (d + w)
    return rows * scan.heads * each


def moved(x: LayerSizes, scan: Mixer, rows: int) -> float:
    """Bytes of memory that one of both reads and writes: arguments, results, states of chunks
    written and read.
    """
    given = scan.convolved * B + (scan.decays + scan.heads * scan.delta) * F
    return rows * (given + scan.values * B) + 2 * chunk_states(x, scan, rows)


def linear_seconds(
    gpu: Gpu, x: LayerSizes, scan: Mixer, rows: int, scanned: bool
) -> tuple[float, float]:
    """Seconds of a forward and of a backward. scanned: states come from other ranks."""
    computed = answers(scan, rows) + scanned * maps(scan, rows)
    read = (1 + scanned) * moved(x, scan, rows)
    forward = max(computed / (gpu.peak * gpu.linear), read / gpu.memory_rate)
    return forward, BACKWARD * forward


ATTENTION, PRODUCTS, MEMORY = "attention", "linear layers", "norms, rope and activations"
LINEAR, STATES = "linear attention", "states between ranks"
TENSOR, EXPERTS, HOST = "tensor parallel", "expert exchange", "host link"
LAUNCHES, LITTLE = "waiting for launches", 0.05  # a fraction of the time
TimesAttention = Callable[..., AttentionTime]  # called as `attention_time`


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer and micro-batch by part. recompute: the forward that backward runs
    again; backward: without it. core: of the core attention, None if the layer has none. launching:
    what the processor needs meanwhile, in forward and from recompute to the end of backward.
    kernel: same as in `AttentionTime`.
    """

    forward: SecondsByPart
    recompute: SecondsByPart
    backward: SecondsByPart
    core: AttentionTime | None = None
    launching: tuple[float, float] = (0.0, 0.0)
    kernel: str | None = None

    def waiting(self) -> LayerTime:
        """The same at least as long as launching takes; it has not waited before."""
        forward, backward = SecondsByPart(self.forward), SecondsByPart(self.backward)
        first, second = self.launching
        forward[LAUNCHES] = max(0.0, first - forward.total)
        backward[LAUNCHES] = max(0.0, second - backward.total - self.recompute.total)
        return replace(self, forward=forward.taken(), backward=backward.taken())

    @property
    def planning(self) -> float:
        """Seconds that the first layer of a micro-batch takes longer, for which its processor has
        to plan before it launches.
        """
        needed = self.launching[0] + (self.core.planning if self.core else 0.0)
        return max(0.0, needed - self.forward.total)

    @property
    def parts(self) -> SecondsByPart:
        """Seconds of forward, recompute and backward together."""
        found = SecondsByPart()
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
    part: LayerPart | None = None,
    attention: TimesAttention = attention_time,
    states: States = scan_seconds,
) -> LayerTime:
    """The time of one layer.

    part: what it is made of, as `parts_of` lists them; None: the last layer's. attention: times
    its core attention; states: times the exchange of states. A search gives ones that remember.
    """
    part = part or parts_of(model, run, run.pp - 1)[-1]
    forward, backward, again = SecondsByPart(), SecondsByPart(), SecondsByPart()
    for product in products(model, run, part):
        taken = product_seconds(cluster.gpu, product) * product.times
        forward[PRODUCTS] += taken * (1 + product.again[0])
        backward[PRODUCTS] += taken * (2 + product.again[1])
    in_forward, in_backward = memory_bytes(model, run, part)
    forward[MEMORY] = in_forward / cluster.gpu.memory_rate
    backward[MEMORY] = in_backward / cluster.gpu.memory_rate
    collectives(model, cluster, run, part, forward, backward)
    if part.attention == MIXER:
        x = LayerSizes.of(model, run)
        if x.scan is not None:
            passed = run.cp > 1 and run.linear != "megatron"
            each = linear_seconds(cluster.gpu, x, x.scan, run.rows, passed)
            forward[LINEAR], backward[LINEAR] = each
            forward[STATES] = backward[STATES] = states(cluster, run, x)
    full = run.recompute == "full"
    if full:
        again.add(forward)
    core = None
    if part.attention in SOFTMAX:
        window = model.window_of(part.attention, run.seq)
        own = replace(run, algorithm=part.algorithm) if part.algorithm else run
        core = attention(model, cluster, own, window=window)
        forward[ATTENTION], backward[ATTENTION] = core.forward, core.backward
        if full:
            again[ATTENTION] = recomputed_attention(core, run)
    copied = host_bytes(model, run, part) / cluster.link
    keys = key_bytes(model, run, part) / cluster.link
    forward[HOST] = max(0.0, copied + keys - forward.total)
    backward[HOST] = max(0.0, copied - backward.total - again.total)
    found = LayerTime(
        forward.taken(), again.taken(), backward.taken(), core, launching(cluster, run, part, core)
    )
    return found.waiting()


def launching(
    cluster: Cluster, run: Settings, part: LayerPart, core: AttentionTime | None
) -> tuple[float, float]:
    """Seconds that launching a layer takes of the processor, in forward and in backward with what
    it recomputes. Half of what is no core attention is launched for each chunk or tile of rows.
    """
    pieces = run.sequence_chunks * (part.attention is not None) + run.mlp_tiles * part.mlp
    rest, (forward, backward) = cluster.host_time.layer / 2 * pieces, core.host if core else (0, 0)
    again = 0.0
    if run.recompute == "full":
        again = rest + forward * (run.store < 1)
    return rest + forward, rest + backward + again


def collectives(
    model: Model,
    cluster: Cluster,
    run: Settings,
    part: LayerPart,
    forward: SecondsByPart,
    backward: SecondsByPart,
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


def host_bytes(model: Model, run: Settings, part: LayerPart) -> float:
    """Bytes of a layer's input and store that one rank copies to the host, and later back."""
    x = LayerSizes.of(model, run, part.sparse)
    out = 0.0 if part.attention in (None, MIXER) else run.rows * (x.out * B + x.heads * F)
    return run.offload * (run.rows / run.tp * model.hidden * B + run.store * out)


def key_bytes(model: Model, run: Settings, part: LayerPart) -> float:
    """Return the bytes of keys of other ranks that one rank copies to the host in a forward."""
    own = replace(run, algorithm=part.algorithm) if part.algorithm else run
    if part.attention not in SOFTMAX or not own.keys_on_host:
        return 0.0
    window = model.window_of(part.attention, run.seq)
    return visiting_rows(own, window) * on_ring(LayerSizes.of(model, run, part.sparse), run).kv * B


# --- parts of attention ------------------------------------------------------------------------


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

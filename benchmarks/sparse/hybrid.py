"""Hybrid attention of DeepSeek-V4-Flash: bytes of a rank and layer, and simulated time.

Our attention uses the plans of Megatron layers (`plugins.sparse.megatron.hybrid_plans`): a window,
compressed keys and, in CSA layers, index keys. There are two rivals with contiguous rows. One rival
receives 128 kv rows of the previous rank and gathers compressed keys and index keys, as in
Megatron-LM-FL #57 and Automodel #3855. The other rival also gathers kv. Both sum gradients by a
reduce-scatter in bf16. Our gradients are sent in fp32, because the layers refuse other dtypes.
Nothing was measured on a GPU. Kernels are assumed to reach the rate of dense attention. Time
excludes projections, `mb.compress` and the indexer's loss.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from benchmarks.report import markdown
from megatron_burst.autotune.candidates import Candidate, FixedSettings, GridSchedules, Workload
from megatron_burst.autotune.clusters import Cluster, gpu
from megatron_burst.autotune.select import best
from megatron_burst.layout import make
from megatron_burst.masks import Mask, Window
from megatron_burst.masks.compressed import Compressed
from megatron_burst.plugins.sparse.compress import window_moves
from megatron_burst.plugins.sparse.window_layout import WindowLayout
from megatron_burst.plugins.tools.advise.forecast.attention_time import without_links
from megatron_burst.plugins.tools.advise.forecast.links import ring_seconds
from megatron_burst.schedule.cost import traffic
from megatron_burst.schedule.sizes import Sizes
from megatron_burst.schedule.topology import Topology

K = 1024
KINDS = {"window": 0, "CSA": 4, "HCA": 128}  # rows of a compressed key
LAYERS = {"window": 2, "CSA": 21, "HCA": 20}
INDEX_HEADS, TOP_K = 64, 512


class Sent(NamedTuple):
    """Bytes that a rank sends, the mean over ranks."""

    forward: float = 0.0
    backward: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Layer:
    """Hybrid attention of one layer, batch 1: tokens, ranks and their layout, sizes, and bytes.

    `ratio` is the number of rows of a compressed key, 0 without such keys. `wire` is the number of
    bytes of an element of gradients that are sent. Keys that an indexer selects are sent by
    `selecting`, other compressed keys by `prefetch`.
    """

    kind: str
    ratio: int
    seq: int
    ranks: int
    per_node: int = 8
    layout: str = "zigzag"
    item: int = 2
    wire: int = 4
    selecting: str = "multicast"
    heads: int = 64
    width: int = 512
    window: int = 128
    index_width: int = 128

    @cached_property
    def keys(self) -> dict[str, tuple[str, Workload]]:
        """Algorithm and workload of attention to each set of keys, and of the indexer."""
        rows = make(self.layout, cp_size=self.ranks)
        mask: Mask = Window(self.window - 1, 0)
        sets = {"window": ("burst", Workload(self._sizes(), mask, rows))}
        if self.ratio:
            mask = Compressed(self.ratio)
            layout, csa = WindowLayout(rows, mask, self.seq), self.kind == "CSA"
            sizes = self._sizes(key_tokens=layout.rows)
            attended = TOP_K if csa else None
            work = Workload(sizes, mask, rows, attended=attended, key_layout=layout)
            sets["compressed"] = self.selecting if csa else "prefetch", work
            if csa:
                sizes = self._sizes(
                    heads=INDEX_HEADS, width=self.index_width, value_width=0,
                    values_are_keys=False, key_tokens=layout.rows, needs_grad=(False,) * 3,
                )  # fmt: skip
                work = Workload(sizes, mask, rows, attended=layout.key_len, key_layout=layout)
                sets["index"] = self.selecting, work
        return sets

    def _sizes(self, **changed: object) -> Sizes:
        fields = {
            "tokens": self.seq // self.ranks, "batch": 1, "heads": self.heads, "kv_heads": 1,
            "width": self.width, "value_width": self.width, "itemsize": self.item,
            "stat_itemsize": max(4, self.item), "wire_itemsize": self.wire,
            "needs_grad": (True, True, False), "values_are_keys": True,
        }  # fmt: skip
        return Sizes(**fields | changed)  # pyright: ignore[reportArgumentType]

    def sent(self) -> dict[str, Sent]:
        """Return the bytes of each set of keys, of `mb.compress`, and of the indexer's loss."""
        topology, sent = Topology(self.ranks, self.per_node), {}
        for name, (algorithm, work) in self.keys.items():
            passes = GridSchedules(work, topology)
            forward = passes.forward(algorithm, work.sizes)
            backward = passes.backward(algorithm, work.sizes, "kv")
            bytes_ = (traffic(p[0].schedule, None, work.sizes).total for p in (forward, backward))
            sent[name] = Sent(*(total / self.ranks for total in bytes_))
        if "index" in sent:  # the loss sends both keys again; only it has gradients of index keys
            index, compressed = sent["index"].forward, sent["compressed"]
            grads = (compressed.backward - compressed.forward) * self.index_width / self.width
            sent["index"] = Sent(index)
            sent["loss"] = Sent(compressed.forward + index, index + grads)
        if self.ratio:
            sent["compress"] = Sent(*2 * (self._exchanged(),))
        return sent

    def _exchanged(self) -> float:
        _, work = self.keys["compressed"]
        columns, layout = self.width, work.key_layout
        columns += self.index_width * ("index" in self.keys)
        assert isinstance(layout, WindowLayout)
        rows = 0
        for back in range(2 if self.kind == "CSA" else 1):
            moves = window_moves(layout.mask, work.layout, layout, self.seq, layout.key_len, back)
            rows += int((moves.source != moves.destination).sum())
        return rows * 2 * columns * self.item / self.ranks  # values and gates

    def rivals(self, loss: bool = False) -> tuple[Sent, Sent]:
        """Return the bytes of both rivals; with `loss`, index gradients are summed too."""
        keys = self.seq // self.ranks * (self.ranks - 1) * self.width * self.item
        compressed = keys // self.ratio if self.ratio else 0
        index = compressed * self.index_width // self.width * (self.kind == "CSA")
        few, most = (
            Sent(kv + compressed + index, kv + compressed + index * loss)
            for kv in (self.window * self.width * self.item, keys)
        )
        return few, most


def bytes_table() -> str:
    """Return MB per rank and layer, forward + backward, and ratios to both rivals."""
    names, lines = ("window", "compressed", "index", "loss", "compress"), []
    for seq, ranks in ((128 * K, 8), (128 * K, 64), (K * K, 8), (K * K, 64)):
        for kind, ratio in KINDS.items():
            for layout in ("zigzag", "contiguous"):
                layer = Layer(kind, ratio, seq, ranks, layout=layout)
                sent, narrow = layer.sent(), replace(layer, wire=2).sent()
                lines.append([
                    f"{seq // K}K, CP {ranks}", kind, layout, *(_mb(sent.get(n)) for n in names),
                    f"{_total(sent):.3g}", *(f"{x.total / 1e6:.3g}" for x in layer.rivals()),
                    _ratios(layer, sent), _ratios(layer, narrow), _ratios(layer, sent, loss=True),
                ])  # fmt: skip
    heads = ["run", "layer", "layout", *names, "ours, without loss", "gather compressed",
             "gather kv too", "ratios", "if gradients were bf16", "with loss"]  # fmt: skip
    return markdown(heads, lines)


def _mb(sent: Sent | None) -> str:
    if sent is None:
        return ""
    return " + ".join(f"{x / 1e6:.3g}" for x in sent) if sent.total else "0"


def _total(sent: dict[str, Sent], loss: bool = False) -> float:
    return sum(x.total for name, x in sent.items() if loss or name != "loss") / 1e6


def _ratios(layer: Layer, sent: dict[str, Sent], loss: bool = False) -> str:
    ours = _total(sent, loss) * 1e6
    return ", ".join(f"{ours / rival.total:.2f}" for rival in layer.rivals(loss))


def ours(layer: Layer, cluster: Cluster, auto: bool) -> list[Candidate]:
    """Return the predicted calls: selection, and attention to each set of keys."""
    topology, rates = Topology(layer.ranks, layer.per_node), cluster.rank_rates()
    return [
        best(work, [topology], rates, FixedSettings(None if auto else name, "kv", 1)).taken
        for name, work in layer.keys.values()
    ]


def gathering(layer: Layer, cluster: Cluster) -> float:
    """Return seconds of the rival that gathers compressed keys; compute begins after a gather."""
    topology, rates, total = Topology(layer.ranks, layer.per_node), cluster.rank_rates(), 0.0
    assert rates.host is not None
    for name, (_, work) in layer.keys.items():
        window, sizes = name == "window", work.sizes  # window rows are sent as in ours
        taken = best(work, [topology], rates if window else without_links(rates)).taken
        every = 0 if window else sizes.key_rows * sizes.forward.kv * layer.ranks
        moved = ring_seconds(cluster, layer.ranks, 1, every)
        total += max(moved + taken.forward.seconds, rates.host.of_pass(1, 1))
        if any(sizes.needs_grad):
            host = rates.host.of_pass(1, 1, backward=True)
            total += max(moved + taken.backward.seconds, host)
    return total


TIMED = ((128 * K, 8), (128 * K, 64), (K * K, 64))  # tokens, context-parallel ranks


def time_table(gpus: int = 512) -> str:
    """Return milliseconds of attention in a layer of each kind, and in all layers."""
    cluster, lines = Cluster(gpu("h100"), gpus), []
    for seq, ranks in TIMED:
        sums = [0.0] * 3
        for kind, count in LAYERS.items():
            layer = Layer(kind, KINDS[kind], seq, ranks)
            calls = ours(layer, cluster, auto=True)
            seconds = [
                sum(call.seconds for call in calls),
                sum(call.seconds for call in ours(layer, cluster, auto=False)),
                gathering(replace(layer, layout="contiguous"), cluster),
            ]
            sums = [total + count * x for total, x in zip(sums, seconds, strict=True)]
            longest = max(calls, key=lambda call: call.seconds).bottleneck
            lines.append([f"{seq // K}K, CP {ranks}", f"{count} {kind}", *_times(seconds), longest])
        lines.append([f"{seq // K}K, CP {ranks}", "all", *_times(sums), ""])
    heads = ["tokens", "layers", "`auto`", "`burst`", "gather, then compute", "auto / gather",
             "burst / gather", "longest call of auto waits for"]  # fmt: skip
    return markdown(heads, lines)


def _times(seconds: list[float]) -> list[str]:
    *ways, rival = seconds
    return [*(f"{x * 1e3:.1f} ms" for x in seconds), *(f"{x / rival:.2f}" for x in ways)]

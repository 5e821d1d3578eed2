# SPDX-License-Identifier: Apache-2.0
"""The runs that a search tries: sizes of groups, then what each of them recomputes and moves.

Decides what is tried, not what is good, and what is refused before: what no way to share the GPUs
out could have. Groups: tensor-parallel ranks within a node, stages that divide the layers or have
fewer on the first and the last, context-parallel ranks that divide the rows, the rest
data-parallel. Options: recompute, store, offload, row chunks and tiles, from short lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Any

from .....autotune.clusters import Cluster
from .....options import algorithms
from .....schedule.topology import alternatives, divisors
from ..settings import (
    ENDS,
    Settings,
    check_carried,
    check_experts,
    check_fields,
    flag_of,
    stage_layers,
    uneven_ends,
)
from ..shapes.model import Model

STAGES = 16  # of a pipeline at most
# Stages of unequal numbers of layers that are tried, and micro-batches for each below which they
# are not, as a fifth of a step would be bubble. Each makes a search longer.
UNEVEN, BUSY = (8, 16), 4
VIRTUAL = (1, 2, 4)  # chunks of layers on each rank of a pipeline
FEW_ROWS = 4096  # a rank with fewer rows may take several sequences at a time
SEQUENCES = (1, 2, 4, 8)  # of a micro-batch
STORES = (1.0, 0.5, 0.0)
OFFLOADS = (0.0, 1.0)
FRACTIONS = tuple(tenth / 10 for tenth in range(11))  # of store and offload, where memory decides
TILES = (1, 8)  # of the MLP half, beside a whole attention half
CHUNKED = ((8, 32), (32, 64))  # sequence chunks, MLP tiles: where nothing else fits
# What `Settings` says of groups; the rest are options.
GROUPS = ("tp", "pp", *ENDS, "vpp", "ep", "cp", "dp", "micro_batch")
# What a user may fix.
SEARCHED = (
    *GROUPS, "recompute", "store", "offload", "sequence_chunks", "mlp_tiles", "optimizer_offload",
    "lm_head_loss", "gradients", "optimizer_bytes", "distributed_optimizer", "algorithm", "layout",
    "side", "linear", "wire", "head_chunks", "ulysses", "placement", "path",
)  # fmt: skip


@dataclass(frozen=True)
class TrainingGoal:
    """What is to be trained: tokens of a sequence, sequences of a step over all ranks, and fields
    of `Settings` that the user has fixed. carries: the model has layers that carry a state, which
    the striped layout does not allow; hybrid: it is Megatron's HybridModel, which does not take
    `--burst-offload`; selects: its attention is sparse, and recomputed whole. documents: lengths of
    those of a pack that zigzag cuts one by one, which fill sequences of this length unpadded.
    """

    seq: int
    sequences: int
    pinned: Mapping[str, Any] = field(default_factory=dict)
    carries: bool = False
    hybrid: bool = False
    selects: bool = False
    documents: tuple[int, ...] = ()

    def rows(self, tp: int, cp: int) -> int:
        """Tokens of a sequence over these ranks, padding included: of every document, and what
        sequence-parallel ranks lack to equal rows.
        """
        if not self.documents:
            return self.seq
        size = sum(padded(length, cp) for length in self.documents)
        return size + -size % (2 * cp * tp)

    def values(self, name: str, tried: Any) -> list[Any]:
        """The values of a field to try: the one that is fixed, or `tried`."""
        return [self.pinned[name]] if name in self.pinned else list(tried)


def padded(length: int, cp: int) -> int:
    """Rows that a document takes where zigzag cuts it: a multiple of 2 x CP."""
    return -(-length // (2 * cp)) * 2 * cp if cp > 1 else length


def of_model(model: Model) -> dict[str, Any]:
    """What a `TrainingGoal` says of the model."""
    hybrid = bool(set(model.pattern) & set("M*-"))
    return {"carries": bool(model.mixers), "hybrid": hybrid, "selects": model.indexer is not None}


def groups_of(model: Model, cluster: Cluster, want: TrainingGoal) -> Iterator[Settings]:
    """Every way to share the GPUs out, without options."""
    options = {k: v for k, v in want.pinned.items() if k not in (*GROUPS, "micro_batches")}
    stages = stages_to_try(model, cluster, want)
    sizes = want.values("tp", tensor_sizes(model, cluster)), want.values("pp", stages)
    for tp, pp in product(*sizes):
        left = cluster.gpus // (tp * pp)
        if cluster.gpus % (tp * pp):
            continue
        for cp in want.values("cp", divisors(left)):
            if left % cp or not _rows_fit(cluster, want, tp, cp):
                continue
            if want.pinned.get("linear") == "megatron" and not model.carried(tp, cp):
                continue
            dp = left // cp
            if dp not in want.values("dp", [dp]):
                continue
            base = replace(Settings(want.rows(tp, cp), kernel=cluster.gpu.kernel), **options)
            intra = cluster.cp_per_node(tp, cp)
            base = replace(base, tp=tp, pp=pp, cp=cp, dp=dp, intra=intra, **_ends(model, want, pp))
            if base.uneven and _odd_stages(model, base):
                continue
            yield from _micro_batches(model, want, base)


def stages_to_try(model: Model, cluster: Cluster, want: TrainingGoal) -> list[int]:
    """Sizes of a pipeline: those that divide the layers, and UNEVEN with fewer layers on the first
    and the last stage. A hybrid model's pattern is cut into equal parts only.
    """
    uneven = [pp for pp in UNEVEN if not want.hybrid and uneven_ends(model.layers, pp) is not None]
    most = min(STAGES, cluster.gpus)
    return sorted({pp for pp in (*divisors(model.layers), *uneven) if pp <= most})


def _ends(model: Model, want: TrainingGoal, pp: int) -> dict[str, int]:
    """Layers of the first and the last stage: those that are fixed, else what layers need that do
    not divide.
    """
    fixed = {name: want.pinned[name] for name in ENDS if name in want.pinned}
    if fixed or model.layers % pp == 0 or want.hybrid:
        return fixed
    ends = uneven_ends(model.layers, pp)
    return {} if ends is None else dict(zip(ENDS, ends, strict=True))


def _odd_stages(model: Model, run: Settings) -> str:
    """Why the layers do not come out even; "" where they do."""
    try:
        stage_layers(model, run)
    except ValueError as error:
        return str(error)
    return ""


def tensor_sizes(model: Model, cluster: Cluster) -> list[int]:
    """Tensor-parallel sizes that Megatron-Core takes: they divide a node and the heads, and divide
    the key/value heads or are a multiple of them (it copies heads then).
    """
    return [
        tp
        for tp in divisors(cluster.ranks_per_node)
        if model.heads % tp == 0
        and (model.kv_heads % tp == 0 or tp % model.kv_heads == 0)
        and model.hidden % tp == 0
        and model.ffn % tp == 0
        and model.carried(tp)
    ]


def _rows_fit(cluster: Cluster, want: TrainingGoal, tp: int, cp: int) -> bool:
    """Do ranks get equal rows, of zigzag and of sequence parallelism, and nodes equal ranks?"""
    if (rows := want.rows(tp, cp)) % (2 * cp) or rows % (cp * tp):
        return False
    return cp % cluster.cp_per_node(tp, cp) == 0


def _micro_batches(model: Model, want: TrainingGoal, base: Settings) -> Iterator[Settings]:
    """With every number of sequences at a time, virtual stages and expert-parallel ranks."""
    few = want.seq // base.cp < FEW_ROWS
    for size in want.values("micro_batch", SEQUENCES if few else SEQUENCES[:1]):
        count, rest = divmod(want.sequences, base.dp * size)
        few_batches = base.uneven and "pp" not in want.pinned and count < BUSY * base.pp
        if rest or not count or few_batches:
            continue
        for vpp in want.values("vpp", VIRTUAL if base.pp > 1 else (1,)):
            # Megatron interleaves micro-batches in rounds of as many as there are stages.
            even = vpp == 1 if base.uneven else model.layers % (base.pp * vpp) == 0
            if not even or (vpp > 1 and (base.pp == 1 or count % base.pp)):
                continue
            for ep in _experts(model, want, base):
                yield replace(base, micro_batch=size, micro_batches=count, vpp=vpp, ep=ep)


def _experts(model: Model, want: TrainingGoal, base: Settings) -> list[int]:
    """Expert-parallel ranks: among data- and context-parallel ones."""
    if not model.experts:
        return want.values("ep", [1])
    tried = want.values("ep", divisors(model.experts))
    return [ep for ep in tried if (base.dp * base.cp) % ep == 0 and model.experts % ep == 0]


def options_of(
    run: Settings,
    want: TrainingGoal,
    chunked: bool,
    stores: Sequence[float] = STORES,
    offloads: Sequence[float] = OFFLOADS,
) -> Iterator[Settings]:
    """What a run with these groups may recompute, store and move. chunked: with the attention half
    in chunks of rows, which only runs over several context-parallel ranks can. stores, offloads:
    the fractions to try of what the user has not fixed.
    """
    moved = want.values("optimizer_offload", OFFLOADS if run.distributed_optimizer else (0.0,))
    for optimizer in moved:
        moving = replace(run, optimizer_offload=optimizer)
        if not chunked and "none" in want.values("recompute", ["none"]) and _plain(want):
            plain = replace(moving, store=0.0, offload=0.0, sequence_chunks=1, mlp_tiles=1)
            yield replace(plain, recompute="none", layout=layout_of(want, 1.0))
        if "full" not in want.values("recompute", ["full"]):
            continue
        kept = want.values("store", stores)
        # The store is of BurstAttention over several ranks, and not of sparse attention.
        if run.cp == 1 or want.selects:
            kept = [store for store in kept if not store]
        copied = want.values("offload", OFFLOADS[:1] if want.hybrid else offloads)
        for store, offload in product(kept, copied):
            for chunks, tiles in _pieces(run, want, chunked):
                yield replace(
                    moving, recompute="full", store=store, offload=offload, sequence_chunks=chunks,
                    mlp_tiles=tiles, layout=layout_of(want, store),
                )  # fmt: skip


def layout_of(want: TrainingGoal, store: float) -> str:
    """The layout that `flags` takes where none is named: striped balances a partial store."""
    striped = 0 < store < 1 and not want.carries
    return want.pinned.get("layout") or ("striped" if striped else "zigzag")


def _plain(want: TrainingGoal) -> bool:
    """Is nothing fixed that only recomputed layers have?"""
    pinned = want.pinned
    moved = any(pinned.get(name) for name in ("store", "offload"))
    return not moved and all(pinned.get(n, 1) == 1 for n in ("sequence_chunks", "mlp_tiles"))


def _pieces(run: Settings, want: TrainingGoal, chunked: bool) -> list[tuple[int, int]]:
    """Pairs (sequence chunks, MLP tiles) to try."""
    if want.selects and chunked:
        return []
    pairs = CHUNKED if chunked else tuple((1, tiles) for tiles in TILES)
    pinned = want.pinned
    found = [
        (pinned.get("sequence_chunks", chunks), pinned.get("mlp_tiles", tiles))
        for chunks, tiles in pairs
    ]
    rows = run.rows // run.tp
    return [
        pair
        for pair in dict.fromkeys(found)
        if not (pair[0] > 1 and run.cp == 1) and rows % pair[0] == 0 and pair[1] <= rows
    ]


STEP = 4 * 2**20  # tokens of a step that a suggestion is near


def check_wanted(model: Model, cluster: Cluster, want: TrainingGoal) -> None:
    """Raise ValueError, with what would do, unless there is a way to share the GPUs out."""
    check_fixed(want)
    check_experts(model, want.pinned.get("ep", 1))
    check_carried(model, want.pinned.get("layout", ""))
    for reason in _reasons(model, cluster, want):
        raise ValueError(reason)
    if next(groups_of(model, cluster, want), None) is None:
        raise ValueError(_no_way(model, cluster, want))


def check_fixed(want: TrainingGoal) -> None:
    """Raise ValueError for what cannot be fixed, or not to this."""
    for name in want.pinned:
        if name not in SEARCHED:
            raise ValueError(f"{name}: can be fixed are {', '.join(SEARCHED)}")
    check_fields(Settings(want.seq, **want.pinned))


def _reasons(model: Model, cluster: Cluster, want: TrainingGoal) -> Iterator[str]:
    pinned, known = want.pinned, algorithms()
    if pinned.get("algorithm", "auto") not in known:
        yield f"--algorithm {pinned['algorithm']}: no such algorithm: take {alternatives(known)}"
    sizes = tensor_sizes(model, cluster)
    if "tp" in pinned and pinned["tp"] not in sizes:
        yield (
            f"--tp {pinned['tp']} does not divide {model.name}'s {model.heads} heads, "
            f"{model.kv_heads} key/value heads and widths and the {cluster.ranks_per_node} GPUs of "
            f"a node: take {alternatives(sizes)}"
        )
    pp, vpp = pinned.get("pp", 1), pinned.get("vpp", 1)
    if vpp > 1 and pinned.get("pp") == 1:
        yield f"--vpp {vpp} needs --pp above 1"
    ends = {name: pinned[name] for name in ENDS if name in pinned}
    said = ", ".join(f"{flag_of(name)} {n}" for name, n in ends.items())
    stages = want.values("pp", stages_to_try(model, cluster, want))
    odd = [_odd_stages(model, Settings(want.seq, pp=n, **ends)) for n in stages] if ends else []
    if ends and (stages == [1] or vpp > 1):
        yield f"{said}: only pipelines of several stages have ends: take --pp 2 or more, --vpp 1"
    elif odd and all(odd):
        none = f"{said}: none of the numbers of stages that are tried has these ends: give --pp"
        yield odd[0] if "pp" in pinned else none
    elif not ends and model.layers % (pp * vpp) and (vpp > 1 or not _ends(model, want, pp)):
        good = [n for n in divisors(model.layers) if n <= min(STAGES, cluster.gpus)]
        yield (
            f"--pp {pp} x --vpp {vpp} do not divide the "
            f"{model.layers} layers of {model.name}: take --pp {alternatives(good)}"
        )
    if want.carries and pinned.get("linear") == "megatron" and "cp" in pinned:
        good = [cp for cp in divisors(cluster.gpus) if model.carried(pinned.get("tp", 1), cp)]
        if pinned["cp"] not in good:
            yield (
                f"--linear megatron shares the heads of {model.name}'s layers of linear attention "
                f"over --cp {pinned['cp']} ranks, which do not divide them: take --cp "
                f"{alternatives(good)}, or --linear auto, which takes any"
            )
    stated = [n for n in ("tp", "pp", "cp", "dp") if n in pinned]
    ranks = prod(pinned[name] for name in stated)
    if cluster.gpus % ranks:
        said = " x ".join(f"--{name} {pinned[name]}" for name in stated)
        yield (
            f"{said} are {ranks} ranks, which do not divide --gpus {cluster.gpus}: take "
            f"{-(-cluster.gpus // ranks) * ranks} GPUs, or smaller groups"
        )


def _no_way(model: Model, cluster: Cluster, want: TrainingGoal) -> str:
    """Why there is none, though nothing that is fixed is wrong by itself."""
    tokens = want.seq * want.sequences
    odd = cluster.gpus // (cluster.gpus & -cluster.gpus)  # what lengths of powers of two lack
    step = max(1, round(STEP / (odd * want.seq))) * odd * want.seq
    if odd > 1 and not want.pinned and step != tokens:
        nearer = replace(want, sequences=step // want.seq)
        if next(groups_of(model, cluster, nearer), None) is not None:
            return (
                f"--gpus {cluster.gpus}: {want.sequences} sequences of {want.seq:,} tokens are not "
                f"shared out evenly: take --tokens-per-step {step}"
            )
    even = max(2, 1 << (want.seq - 1).bit_length())
    longer = f"--seq a power of two, such as {even}, or " if even != want.seq else ""
    return (
        f"--gpus {cluster.gpus}: no TP x PP x CP x DP shares {want.sequences} sequences of "
        f"{want.seq:,} tokens out evenly: sequences must be a multiple of DP, and --seq of 2 x CP "
        f"and TP x CP. Give {longer}--tokens-per-step a multiple of --seq other than {tokens:,}"
    )

# SPDX-License-Identifier: Apache-2.0
"""Settings that a search tries: parallel sizes (groups), and options for each choice of them.

Tensor-parallel ranks are within a node. Pipeline stages have equally many layers, except that the
first and the last stage may have fewer. Context-parallel ranks have equally many rows.
Data-parallel ranks use the remaining GPUs. Options are recompute, store, offload, row chunks and
tiles, with a few values each. `check_wanted` raises ValueError if the fixed settings are impossible
with all parallel sizes.
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
from .model_flags import is_hybrid

STEP = 4 * 2**20  # default tokens of a step, over all ranks
STAGES = 16  # maximum number of pipeline stages
# Numbers of stages that are tried with different numbers of layers, and the minimum number of
# micro-batches divided by stages. With fewer micro-batches the pipeline bubble would take a fifth
# of a step. Each entry of UNEVEN makes a search longer.
UNEVEN, BUSY = (8, 16), 4
VIRTUAL = (1, 2, 4)  # virtual stages per pipeline rank
FEW_ROWS = 4096  # with fewer rows per rank, micro-batches of several sequences are tried
SEQUENCES = (1, 2, 4, 8)  # sequences per micro-batch
STORES = (1.0, 0.5, 0.0)
OFFLOADS = (0.0, 1.0)
# Values of store and offload, if memory limits them.
FRACTIONS = tuple(tenth / 10 for tenth in range(11))
TILES = (1, 8)  # MLP tiles, if attention does not run in row chunks
CHUNKED = ((8, 32), (32, 64))  # pairs (sequence chunks, MLP tiles), if nothing else fits
# Fields of `Settings` that are parallel sizes; other fields are options.
GROUPS = ("tp", "pp", *ENDS, "vpp", "ep", "cp", "dp", "micro_batch")
# Fields of `Settings` that a user may fix.
SEARCHED = (
    *GROUPS, "recompute", "store", "offload", "sequence_chunks", "mlp_tiles", "optimizer_offload",
    "lm_head_loss", "gradients", "optimizer_bytes", "distributed_optimizer", "algorithm", "layout",
    "side", "linear", "wire", "head_chunks", "ulysses", "placement", "path",
)  # fmt: skip


@dataclass(frozen=True)
class TrainingGoal:
    """Goal of a search: batch, fixed settings, and limits that depend on the model.

    Attributes:
        seq: Tokens of a sequence.
        sequences: Sequences per step over all ranks.
        pinned: Fields of `Settings` that the user has fixed.
        carries: Whether the model has linear-attention layers, which do not support the striped
            layout.
        hybrid: Whether the model is Megatron's HybridModel, which does not support
            `--burst-offload`.
        selects: Whether attention is sparse or hybrid. Such attention supports no store, no row
            chunks and no `--burst-offload`.
        documents: Lengths of the documents of a pack if zigzag cuts each document; otherwise ().
            The sum of the lengths is `seq`.
    """

    seq: int
    sequences: int
    pinned: Mapping[str, Any] = field(default_factory=dict)
    carries: bool = False
    hybrid: bool = False
    selects: bool = False
    documents: tuple[int, ...] = ()

    def rows(self, tp: int, cp: int) -> int:
        """Return the tokens of a sequence, including the padding that these parallel sizes require.

        Each document is padded. Then the sequence is padded, so that sequence-parallel ranks have
        equally many rows.
        """
        if not self.documents:
            return self.seq
        size = sum(padded(length, cp) for length in self.documents)
        return size + -size % (2 * cp * tp)

    def values(self, name: str, tried: Any) -> list[Any]:
        """Return the values to try for a field: its fixed value, or `tried` if it is not fixed."""
        return [self.pinned[name]] if name in self.pinned else list(tried)


def padded(length: int, cp: int) -> int:
    """Return the length of a document padded to a multiple of 2 x CP, as zigzag requires."""
    return -(-length // (2 * cp)) * 2 * cp if cp > 1 else length


def of_model(model: Model) -> dict[str, Any]:
    """Return the fields of a `TrainingGoal` that depend on the model."""
    hybrid, carries = is_hybrid(model), bool(model.mixers)
    return {"carries": carries, "hybrid": hybrid, "selects": model.selects}


def groups_of(model: Model, cluster: Cluster, goal: TrainingGoal) -> Iterator[Settings]:
    """Yield settings for each choice of parallel sizes. Other fields are fixed or have defaults."""
    options = {k: v for k, v in goal.pinned.items() if k not in (*GROUPS, "micro_batches")}
    stages = stages_to_try(model, cluster, goal)
    sizes = goal.values("tp", tensor_sizes(model, cluster)), goal.values("pp", stages)
    for tp, pp in product(*sizes):
        left = cluster.gpus // (tp * pp)
        if cluster.gpus % (tp * pp):
            continue
        for cp in goal.values("cp", divisors(left)):
            if left % cp or not _rows_fit(model, cluster, goal, tp, cp):
                continue
            if goal.pinned.get("linear") == "megatron" and not model.carried(tp, cp):
                continue
            dp = left // cp
            if dp not in goal.values("dp", [dp]):
                continue
            gpu = cluster.gpu
            base = Settings(goal.rows(tp, cp), kernel=gpu.kernel, one_queue=gpu.one_queue)
            base = replace(base, **options)
            intra = cluster.cp_per_node(tp, cp)
            base = replace(base, tp=tp, pp=pp, cp=cp, dp=dp, intra=intra, **_ends(model, goal, pp))
            if base.uneven and _odd_stages(model, base):
                continue
            yield from _micro_batches(model, goal, base)


def stages_to_try(model: Model, cluster: Cluster, goal: TrainingGoal) -> list[int]:
    """Return the pipeline-parallel sizes to try.

    These are the divisors of the number of layers and the sizes in UNEVEN. If a size in UNEVEN does
    not divide the number of layers, the first and the last stage have fewer layers. HybridModels do
    not support this, so UNEVEN is not tried for them.
    """
    uneven = [pp for pp in UNEVEN if not goal.hybrid and uneven_ends(model.layers, pp) is not None]
    most = min(STAGES, cluster.gpus)
    return sorted({pp for pp in (*divisors(model.layers), *uneven) if pp <= most})


def _ends(model: Model, goal: TrainingGoal, pp: int) -> dict[str, int]:
    """Return `first_layers` and `last_layers` as keyword arguments; {} if stages are equally large.

    The numbers are fixed by the user, or chosen if `pp` does not divide the number of layers.
    """
    fixed = {name: goal.pinned[name] for name in ENDS if name in goal.pinned}
    if fixed or model.layers % pp == 0 or goal.hybrid:
        return fixed
    ends = uneven_ends(model.layers, pp)
    return {} if ends is None else dict(zip(ENDS, ends, strict=True))


def _odd_stages(model: Model, run: Settings) -> str:
    """Return the error message if the layers cannot be divided into the stages of a run, or ""."""
    try:
        stage_layers(model, run)
    except ValueError as error:
        return str(error)
    return ""


def tensor_sizes(model: Model, cluster: Cluster) -> list[int]:
    """Return the tensor-parallel sizes that Megatron-Core accepts.

    They divide the GPUs of a node, the query heads, and the output groups of hybrid attention. They
    divide the key/value heads, or are multiples of their number; Megatron then replicates heads.
    """
    return [
        tp
        for tp in divisors(cluster.ranks_per_node)
        if model.heads % tp == 0
        and (model.kv_heads % tp == 0 or tp % model.kv_heads == 0)
        and model.hidden % tp == 0
        and model.ffn % tp == 0
        and model.carried(tp)
        and (model.hybrid is None or model.hybrid.groups % tp == 0)
    ]


def _rows_fit(model: Model, cluster: Cluster, goal: TrainingGoal, tp: int, cp: int) -> bool:
    """Return whether all ranks get equally many rows, and all nodes equally many ranks.

    Rows are divided by zigzag (2 x CP) and by sequence parallelism (TP x CP). All rows of a
    compressed key (hybrid attention) must be on one rank.
    """
    if (rows := goal.rows(tp, cp)) % (2 * cp * model.key_rows) or rows % (cp * tp):
        return False
    return cp % cluster.cp_per_node(tp, cp) == 0


def _micro_batches(model: Model, goal: TrainingGoal, base: Settings) -> Iterator[Settings]:
    """Yield `base` with each micro-batch size, number of virtual stages and expert parallelism."""
    short = goal.seq // base.cp < FEW_ROWS
    for size in goal.values("micro_batch", SEQUENCES if short else SEQUENCES[:1]):
        count, remainder = divmod(goal.sequences, base.dp * size)
        few_batches = base.uneven and "pp" not in goal.pinned and count < BUSY * base.pp
        if remainder or not count or few_batches:
            continue
        for vpp in goal.values("vpp", VIRTUAL if base.pp > 1 else (1,)):
            # Megatron interleaves micro-batches in rounds of PP micro-batches.
            even = vpp == 1 if base.uneven else model.layers % (base.pp * vpp) == 0
            if not even or (vpp > 1 and (base.pp == 1 or count % base.pp)):
                continue
            for ep in _experts(model, goal, base):
                yield replace(base, micro_batch=size, micro_batches=count, vpp=vpp, ep=ep)


def _experts(model: Model, goal: TrainingGoal, base: Settings) -> list[int]:
    """Return expert-parallel sizes that divide the number of experts and DP x CP."""
    if not model.experts:
        return goal.values("ep", [1])
    sizes = goal.values("ep", divisors(model.experts))
    return [ep for ep in sizes if (base.dp * base.cp) % ep == 0 and model.experts % ep == 0]


def options_of(
    run: Settings,
    goal: TrainingGoal,
    chunked: bool,
    stores: Sequence[float] = STORES,
    offloads: Sequence[float] = OFFLOADS,
) -> Iterator[Settings]:
    """Yield runs with the parallel sizes of `run` and each combination of options.

    Args:
        run: Settings with the parallel sizes.
        goal: Goal of the search.
        chunked: Whether attention runs in row chunks, which requires several context-parallel
            ranks.
        stores: Values of `store` (fraction of rows with stored attention outputs) to try if the
            user has not fixed it.
        offloads: Values of `offload` to try if the user has not fixed it.
    """
    moved = goal.values("optimizer_offload", OFFLOADS if run.distributed_optimizer else (0.0,))
    for optimizer in moved:
        moving = replace(run, optimizer_offload=optimizer)
        if not chunked and "none" in goal.values("recompute", ["none"]) and _plain(goal):
            plain = replace(moving, store=0.0, offload=0.0, sequence_chunks=1, mlp_tiles=1)
            yield replace(plain, recompute="none", layout=layout_of(goal, 1.0))
        if "full" not in goal.values("recompute", ["full"]):
            continue
        used_stores = goal.values("store", stores)
        # An attention store requires several context-parallel ranks and dense attention.
        if run.cp == 1 or goal.selects:
            used_stores = [store for store in used_stores if not store]
        kept = goal.hybrid or goal.selects
        used_offloads = goal.values("offload", OFFLOADS[:1] if kept else offloads)
        for store, offload in product(used_stores, used_offloads):
            for chunks, tiles in _pieces(run, goal, chunked):
                yield replace(
                    moving, recompute="full", store=store, offload=offload, sequence_chunks=chunks,
                    mlp_tiles=tiles, layout=layout_of(goal, store),
                )  # fmt: skip


def layout_of(goal: TrainingGoal, store: float) -> str:
    """Return the layout of a run: the fixed layout, or the one that suits its attention store.

    Args:
        goal: Goal of the search.
        store: Fraction of the rows whose attention outputs are stored. A fraction between 0 and 1
            selects "striped", unless the model has linear-attention layers. Otherwise "zigzag" is
            selected.
    """
    striped = 0 < store < 1 and not goal.carries
    return goal.pinned.get("layout") or ("striped" if striped else "zigzag")


def _plain(goal: TrainingGoal) -> bool:
    """Return False if a fixed setting, such as row chunks or offload, requires recomputation."""
    pinned = goal.pinned
    moved = any(pinned.get(name) for name in ("store", "offload"))
    return not moved and all(pinned.get(n, 1) == 1 for n in ("sequence_chunks", "mlp_tiles"))


def _pieces(run: Settings, goal: TrainingGoal, chunked: bool) -> list[tuple[int, int]]:
    """Return pairs to try: number of row chunks, and number of MLP tiles."""
    if goal.selects and chunked:
        return []
    pairs = CHUNKED if chunked else tuple((1, tiles) for tiles in TILES)
    pinned = goal.pinned
    candidates = [
        (pinned.get("sequence_chunks", chunks), pinned.get("mlp_tiles", tiles))
        for chunks, tiles in pairs
    ]
    rows = run.rows // run.tp
    return [
        pair
        for pair in dict.fromkeys(candidates)
        if not (pair[0] > 1 and run.cp == 1) and rows % pair[0] == 0 and pair[1] <= rows
    ]


def check_wanted(model: Model, cluster: Cluster, goal: TrainingGoal) -> None:
    """Raise ValueError if no choice of parallel sizes is possible.

    Args:
        model: Shape of the model.
        cluster: Cluster of GPUs.
        goal: Goal of the search.

    Raises:
        ValueError: No choice is possible; the message says what would work.
    """
    check_fixed(goal)
    check_experts(model, goal.pinned.get("ep", 1))
    check_carried(model, goal.pinned.get("layout", ""))
    for reason in _reasons(model, cluster, goal):
        raise ValueError(reason)
    if next(groups_of(model, cluster, goal), None) is None:
        raise ValueError(_no_way(model, cluster, goal))


def check_fixed(goal: TrainingGoal) -> None:
    """Raise ValueError if a fixed setting does not exist or has an impossible value."""
    for name in goal.pinned:
        if name not in SEARCHED:
            raise ValueError(f"{name} cannot be fixed; use one of {', '.join(SEARCHED)}")
    check_fields(Settings(goal.seq, **goal.pinned))


def _reasons(model: Model, cluster: Cluster, goal: TrainingGoal) -> Iterator[str]:
    pinned, names = goal.pinned, algorithms()
    if pinned.get("algorithm", "auto") not in names:
        yield f"--algorithm {pinned['algorithm']} does not exist; use {alternatives(names)}"
    sizes = tensor_sizes(model, cluster)
    if "tp" in pinned and pinned["tp"] not in sizes:
        yield (
            f"--tp {pinned['tp']} must divide the {model.heads} heads, the {model.kv_heads} "
            f"key/value heads and the widths of {model.name}, and the {cluster.ranks_per_node} "
            f"GPUs of a node; use {alternatives(sizes)}"
        )
    pp, vpp = pinned.get("pp", 1), pinned.get("vpp", 1)
    if vpp > 1 and pinned.get("pp") == 1:
        yield f"--vpp {vpp} requires --pp above 1, got --pp 1"
    ends = {name: pinned[name] for name in ENDS if name in pinned}
    stated_ends = ", ".join(f"{flag_of(name)} {n}" for name, n in ends.items())
    stages = goal.values("pp", stages_to_try(model, cluster, goal))
    odd = [_odd_stages(model, Settings(goal.seq, pp=n, **ends)) for n in stages] if ends else []
    if ends and (stages == [1] or vpp > 1):
        yield (
            f"{stated_ends}: different numbers of layers require several pipeline stages and no "
            "virtual stages; use --pp 2 or more, and --vpp 1"
        )
    elif odd and all(odd):
        none = f"{stated_ends} is impossible with every --pp that the search tries; set --pp too"
        yield odd[0] if "pp" in pinned else none
    elif not ends and model.layers % (pp * vpp) and (vpp > 1 or not _ends(model, goal, pp)):
        good = [n for n in divisors(model.layers) if n <= min(STAGES, cluster.gpus)]
        yield (
            f"--pp {pp} x --vpp {vpp} cannot share the "
            f"{model.layers} layers of {model.name} equally; use --pp {alternatives(good)}"
        )
    if goal.carries and pinned.get("linear") == "megatron" and "cp" in pinned:
        good = [cp for cp in divisors(cluster.gpus) if model.carried(pinned.get("tp", 1), cp)]
        if pinned["cp"] not in good:
            yield (
                f"--linear megatron: --cp {pinned['cp']} does not divide the heads of linear "
                f"attention in {model.name}; use --cp {alternatives(good)}, or --linear auto, "
                "which supports any --cp"
            )
    stated = [n for n in ("tp", "pp", "cp", "dp") if n in pinned]
    ranks = prod(pinned[name] for name in stated)
    if cluster.gpus % ranks:
        stated_ends = " x ".join(f"--{name} {pinned[name]}" for name in stated)
        yield (
            f"--gpus {cluster.gpus} is not a multiple of the {ranks} ranks of {stated_ends}; use "
            f"{-(-cluster.gpus // ranks) * ranks} GPUs, or smaller parallel sizes"
        )


def _no_way(model: Model, cluster: Cluster, goal: TrainingGoal) -> str:
    """Return the error message for fixed settings that are valid one by one but not together."""
    tokens = goal.seq * goal.sequences
    # Lengths that are powers of two are not divisible by the odd factor of the ranks.
    odd = cluster.gpus // (cluster.gpus & -cluster.gpus)
    step = max(1, round(STEP / (odd * goal.seq))) * odd * goal.seq
    if odd > 1 and not goal.pinned and step != tokens:
        nearer = replace(goal, sequences=step // goal.seq)
        if next(groups_of(model, cluster, nearer), None) is not None:
            return (
                f"--gpus {cluster.gpus}: {goal.sequences} sequences of {goal.seq:,} tokens cannot "
                f"be shared equally; use --tokens-per-step {step}"
            )
    even = max(2, 1 << (goal.seq - 1).bit_length())
    longer = f"--seq a power of two, such as {even}, or " if even != goal.seq else ""
    return (
        f"--gpus {cluster.gpus}: no TP x PP x CP x DP can share {goal.sequences} sequences of "
        f"{goal.seq:,} tokens equally: DP must divide the number of sequences, and 2 x CP and TP x "
        f"CP must divide --seq. Use {longer}a different multiple of --seq as --tokens-per-step, "
        f"got {tokens:,}"
    )

# SPDX-License-Identifier: Apache-2.0
"""`Settings`: the parallel sizes and options of a run that affect its memory and time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, get_type_hints

from ....options import ring_algorithm
from ....schedule.algorithms import ALGORITHMS
from ....schedule.head_shares import shareable
from ....schedule.topology import Placement, alternatives, divisors
from ....units import byte_size
from .field_types import problem_of
from .shapes.layer_kinds import CHUNKED, CSA, CSA_RATIO, HCA, WINDOW
from .shapes.models import Model

# Modules of a layer: Megatron's local modules for a CPU (torch's norms in fp32, unfused rope and
# SwiGLU), or Transformer Engine's modules for a GPU.
Path = Literal["gpu", "cpu"]
Recompute = Literal["none", "full"]
Loss = Literal["off", "single_pass", "recompute"]
Dtype = Literal["fp32", "bf16"]
Route = Literal["auto", "ring", "direct"]
# Algorithm of linear-attention layers: a scan of states, or Megatron's exchange of heads.
Linear = Literal["auto", "all_gather", "scan", "two_level", "ring", "megatron"]
BYTES = {"fp32": 4, "bf16": 2}
ENDS = ("first_layers", "last_layers")


@dataclass(frozen=True)
class Settings:
    """Settings of a training run.

    Fields annotated with a help text have a flag of the same name in `advise` or `memory`.

    Attributes:
        seq: Tokens of a sequence, over all context-parallel ranks.
        logits_bytes: Bytes per logit if the loss is not fused (lm_head_loss "off"): one bf16 and
            two fp32 copies.
        window_algorithm: Attention algorithm of sliding-window layers; None to use `algorithm`. In
            training, `--context-parallel-algo auto` chooses it.
        chunk_algorithm: Same as `window_algorithm`, for layers with chunked attention.
        kernel: Name of the attention kernel; None for the fastest kernel.
        rope_local: Whether rotary tables contain only the positions of this rank. If False, they
            contain the positions of the whole sequence.
        intra: Context-parallel ranks per node, for memory and flags; None if all ranks are on one
            node. Predicted times depend on the nodes of the cluster instead.
        inner: Ranks of the inner ring of a two-level ring; None for all ranks of the ring that are
            on one node.
        route: "ring": ranks forward chunks (rows of one rank) along the ring. "direct": the rank
            that owns a chunk sends it to each rank that needs it. "auto": the route with fewer
            bytes, as in training.
        one_queue: Whether the GPU requires one hardware queue; see `Gpu.one_queue`.
        gathered: Number of layers whose parameters are gathered at the same time with `fsdp`
            (ZeRO-3).
        chunks_on_host: Whether queries, keys, values and results of all row chunks except two are
            in host memory. This models FPDT; the package has no such flag.
    """

    seq: int
    tp: Annotated[int, "tensor-parallel size, with sequence parallelism"] = 1
    cp: Annotated[int, "context-parallel size"] = 1
    pp: Annotated[int, "pipeline-parallel size"] = 1
    vpp: Annotated[int, "virtual pipeline stages per rank"] = 1
    ep: Annotated[int, "expert-parallel size"] = 1
    dp: Annotated[int, "data-parallel size"] = 1
    first_layers: Annotated[
        int | None, "layers of the first pipeline stage, if different from the other stages"
    ] = None
    last_layers: Annotated[
        int | None, "layers of the last pipeline stage, if different from the other stages"
    ] = None
    micro_batch: Annotated[int, "sequences per micro-batch"] = 1
    micro_batches: Annotated[int, "micro-batches per step and data-parallel rank"] = 1
    recompute: Annotated[Recompute, "recompute whole layers in backward, or nothing"] = "full"
    store: Annotated[float, "fraction of attention outputs kept for the recompute"] = 0.0
    offload: Annotated[float, "fraction of saved activations offloaded to host memory"] = 0.0
    sequence_chunks: Annotated[
        int, "number of row chunks in which the attention of a layer runs, one after the other"
    ] = 1
    mlp_tiles: Annotated[
        int, "number of row chunks in which the MLP of a layer runs, one after the other"
    ] = 1
    lm_head_loss: Annotated[
        Loss, "fused LM head and loss: off, in one pass, or with logits recomputed"
    ] = "single_pass"
    logits_bytes: int = 10
    gradients: Annotated[Dtype, "dtype of the gradient reduction"] = "fp32"
    distributed_optimizer: Annotated[
        bool, "shard optimizer states over data- and context-parallel ranks"
    ] = True
    optimizer_bytes: Annotated[
        int, "bytes of optimizer states (fp32 weights and moments) per parameter"
    ] = 12
    optimizer_offload: Annotated[float, "fraction of optimizer states in host memory"] = 0.0
    algorithm: Annotated[str, "attention algorithm: ring, burst, hybrid, tile, ..."] = "burst"
    window_algorithm: str | None = None
    chunk_algorithm: str | None = None
    kernel: str | None = None
    layout: Annotated[
        str, "layout of the sequence: zigzag or striped; for packed documents balanced or zigzag"
    ] = "zigzag"
    side: Annotated[str, "tensors sent in backward: kv (K, V) or query (Q, dO)"] = "auto"
    linear: Annotated[Linear, "how ranks exchange the states of linear attention"] = "auto"
    wire: Annotated[Dtype, "dtype of the gradients that attention sends in backward"] = "fp32"
    rope_local: bool = True
    intra: int | None = None
    ulysses: Annotated[int, "context-parallel ranks that share heads by all-to-all"] = 1
    placement: Annotated[
        Placement,
        "head_first: adjacent ranks share heads; context_first: adjacent ranks form a ring",
    ] = "head_first"
    inner: int | None = None
    route: Route = "auto"
    head_chunks: Annotated[
        int, "number of groups of heads; one group is sent while another one is computed"
    ] = 1
    fsdp: Annotated[bool, "shard parameters and gradients in addition to optimizer states"] = False
    one_queue: bool = True
    gathered: int = 2
    chunks_on_host: bool = False
    path: Annotated[
        Path, "layers of Transformer Engine (gpu), or Megatron's local layers (cpu)"
    ] = "gpu"

    @property
    def gpus(self) -> int:
        """Number of GPUs: product of the parallel sizes."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def rows(self) -> int:
        """Number of rows (tokens) of a context-parallel rank in all sequences of a micro-batch."""
        return self.seq // self.cp * self.micro_batch

    @property
    def by_kind(self) -> dict[str, str]:
        """Kind of layer -> attention algorithm, for kinds that do not use `algorithm`."""
        own = {WINDOW: self.window_algorithm, CHUNKED: self.chunk_algorithm}
        return {kind: algorithm for kind, algorithm in own.items() if algorithm is not None}

    @property
    def keys_on_host(self) -> bool:
        """True if forward keeps other ranks' keys and values in host memory between row chunks."""
        ring = ALGORITHMS.get(ring_algorithm(self.algorithm))
        offloaded = self.offload > 0 and ring is not None and ring.keeps
        return offloaded and self.sequence_chunks > 1 and self.cp > self.ulysses

    @property
    def sets_one_queue(self) -> bool:
        """True if CUDA_DEVICE_MAX_CONNECTIONS is 1. Megatron refuses this value with FSDP."""
        return self.one_queue and not self.fsdp

    @property
    def relay_stream(self) -> bool:
        """True if attention sends received rows on a stream of their own; see `comm.relays`."""
        return self.path == "gpu" and not self.sets_one_queue

    def uniform(self) -> Settings:
        """Return the settings with `algorithm` for all layers."""
        return replace(self, window_algorithm=None, chunk_algorithm=None)

    @property
    def uneven(self) -> bool:
        """True if the first or the last pipeline stage has its own number of layers."""
        return self.first_layers is not None or self.last_layers is not None

    @property
    def chunked(self) -> bool:
        """True if attention runs in several row chunks, or the MLP in several tiles of rows."""
        return self.sequence_chunks > 1 or self.mlp_tiles > 1


def selection_text(model: Model, run: Settings) -> str | None:
    """Return a sentence on sparse attention: numbers of selected keys and of bytes that ranks send.

    Returns:
        The sentence; None if the model has neither sparse nor hybrid attention.
    """
    if model.hybrid is not None:
        return _hybrid_text(model, run)
    if (index := model.indexer) is None or (low := model.latent) is None:
        return None
    keys, latents = (
        byte_size(run.rows * width * BYTES["bf16"])
        for width in (index.width, low.kv_rank + low.rope)
    )
    return (
        f"sparse attention: {index.heads} index heads select {index.top_k:,} keys for each query. "
        f"In each layer, every rank sends its index keys ({keys}) and latents ({latents}) to all "
        "other ranks. Backward sends the latents again, and their gradients"
    )


def _hybrid_text(model: Model, run: Settings) -> str:
    of, row = model.hybrid, model.head_dim * BYTES["bf16"]
    assert of is not None
    pieces = run.micro_batch * {"zigzag": 2}.get(run.layout, 1)
    parts = [f"its window keys ({byte_size(pieces * (of.window - 1) * row)})"]
    for kind in (CSA, HCA):
        if kind in model.kinds:
            size = byte_size(run.rows // of.ratio_of(kind) * row)
            parts.append(f"in {kind} layers its compressed keys ({size})")
        if kind in model.kinds and (index := of.index_of(kind)) is not None:
            size = byte_size(run.rows // CSA_RATIO * index.width * BYTES["bf16"])
            parts.append(f"and index keys ({size})")
    return (
        f"hybrid attention: in each layer, every rank sends {', '.join(parts)} to the ranks that "
        "attend to them. Backward sends the keys again, and their gradients"
    )


def check(model: Model, run: Settings) -> None:
    """Raise ValueError for settings that are impossible for a model.

    Args:
        model: Shape of the model.
        run: Settings of the run.

    Raises:
        ValueError: A setting is impossible; the message says what would work.
    """
    check_fields(run)
    if model.heads % run.tp:
        good = [tp for tp in (1, 2, 4, 8, 16, 32) if model.heads % tp == 0]
        raise ValueError(
            f"--tp {run.tp} does not divide the {model.heads} heads of {model.name}; use "
            f"{_one_of(good)}"
        )
    if run.seq % (2 * run.cp):
        near = max(1, round(run.seq / (2 * run.cp))) * 2 * run.cp
        raise ValueError(f"--seq {run.seq} is not a multiple of 2 x --cp {run.cp}; use {near}")
    for name in ("sequence_chunks", "mlp_tiles"):
        if getattr(run, name) > run.rows:
            raise ValueError(
                f"{flag_of(name)} {getattr(run, name)} exceeds the {run.rows} rows of a rank; use "
                f"at most {run.rows}"
            )
    if run.sequence_chunks > 1 and run.cp == 1 and not run.chunks_on_host:
        raise ValueError(
            f"--sequence-chunks {run.sequence_chunks} requires --cp above 1 (context "
            "parallelism), got --cp 1"
        )
    stage_layers(model, run)
    if run.vpp > 1 and run.pp == 1:
        raise ValueError(f"--vpp {run.vpp} requires --pp above 1, got --pp 1")
    check_experts(model, run.ep)
    _check_heads(model, run)
    if run.cp > 1:
        check_carried(model, run.layout)
    _check_mixer(model, run)
    for kind, algorithm in run.by_kind.items():
        _check_kind(model, run, kind, algorithm)
    if run.recompute == "none" and (run.store or run.offload or run.chunked):
        raise ValueError(
            "--store, --offload, --sequence-chunks and --mlp-tiles require --recompute full, "
            "got --recompute none"
        )


def stage_layers(model: Model, run: Settings) -> list[int]:
    """Return the number of layers of each pipeline stage, in the order of the stages.

    Args:
        model: Shape of the model.
        run: Settings of the run.

    Raises:
        ValueError: The layers cannot be divided into these stages.
    """
    ends = [n for n in (run.first_layers, run.last_layers) if n is not None]
    if not ends and model.layers % (run.pp * run.vpp) == 0:
        return [model.layers // run.pp] * run.pp
    left, middle = model.layers - sum(ends), run.pp - len(ends)
    if ends and run.vpp == 1 < run.pp:
        per_stage, remainder = divmod(left, middle) if middle else (0, left)
        if remainder == 0 and (per_stage > 0 or not middle):
            first, last = (n or per_stage for n in (run.first_layers, run.last_layers))
            return [first, *[per_stage] * (run.pp - 2), last]
    named = [(name, getattr(run, name)) for name in ENDS]
    stated_ends = "".join(f", {flag_of(name)} {n}" for name, n in named if n is not None)
    good = divisors(model.layers)
    fix = f"use --pp and --vpp with a product of {alternatives(good)}"
    if run.vpp == 1 and (uneven := uneven_ends(model.layers, run.pp)) is not None:
        fix += f", or --first-layers {uneven[0]} --last-layers {uneven[1]}"
    raise ValueError(
        f"--pp {run.pp} x --vpp {run.vpp}{stated_ends} cannot share the {model.layers} layers of "
        f"{model.name} equally; {fix}"
    )


def uneven_rounds(run: Settings) -> str:
    """Return an error message if virtual stages do not support the run's micro-batches, or ""."""
    if run.vpp == 1 or run.micro_batches % run.pp == 0:
        return ""
    return (
        f"--micro-batches {run.micro_batches} is not a multiple of --pp {run.pp}, which "
        f"--vpp {run.vpp} requires; use {-(-run.micro_batches // run.pp) * run.pp}"
    )


def uneven_ends(layers: int, stages: int) -> tuple[int, int] | None:
    """Return numbers of layers for the first and the last pipeline stage.

    The first and the last stage have at most as many layers as the other stages, because they also
    have the embedding and the loss. The result is None if there are too few layers, or only one
    stage.

    Args:
        layers: Number of layers of the model.
        stages: Number of pipeline stages.
    """
    most = -(-layers // stages)
    ends = layers - most * (stages - 2)
    return (ends - ends // 2, ends // 2) if stages > 1 and ends > 1 else None


def _one_of(numbers: Sequence[int]) -> str:
    """Return possible values of a setting as text: "4", or "one of 1, 2, 4"."""
    return f"{'one of ' if len(numbers) > 1 else ''}{', '.join(map(str, numbers))}"


def check_experts(model: Model, ep: int) -> None:
    """Raise ValueError if the expert-parallel size does not divide the number of experts."""
    if ep > 1 and not model.experts:
        raise ValueError(f"--ep {ep} requires experts, and {model.name} has none; remove --ep")
    if model.experts and model.experts % ep:
        raise ValueError(
            f"--ep {ep} does not divide the {model.experts} experts of {model.name}; use "
            f"{alternatives(divisors(model.experts))}"
        )


def check_carried(model: Model, layout: str) -> None:
    """Raise ValueError if the model has linear attention and the layout does not support it."""
    if model.mixers and "striped" in layout:
        raise ValueError(
            f"--layout {layout} puts neighbouring rows on different ranks, so the linear "
            f"attention of {model.name} would send a state after every row; use zigzag or "
            "contiguous"
        )


def check_fields(run: Settings) -> None:
    """Raise ValueError if a field has a value of a wrong type or out of range."""
    wrong = []
    for name, kind in _TYPES.items():
        problem = problem_of(kind, getattr(run, name), 0 if name.endswith("_bytes") else 1)
        wrong += [f"{flag_of(name)} {problem}"] if problem else []
    if wrong:
        raise ValueError("; ".join(wrong))


_TYPES = get_type_hints(Settings)


def flag_of(name: str) -> str:
    """Return the command-line flag of a field, such as "--mlp-tiles" for "mlp_tiles"."""
    return f"--{name.replace('_', '-')}"


def _check_heads(model: Model, run: Settings) -> None:
    """Raise ValueError if the settings do not suit the model's heads or its sparse attention."""
    heads, kv_heads = model.heads // run.tp, max(1, model.kv_heads // run.tp)

    def fits(ranks: int) -> bool:
        if model.selects:
            return ranks == 1
        return run.cp % ranks == 0 and shareable(heads, kv_heads, ranks)

    if model.hybrid is not None:
        _check_hybrid(model, run)
    if model.selects:
        kv_heads = 1
        for name, only in (("store", 0), ("sequence_chunks", 1), ("offload", 0)):
            if getattr(run, name) != only:
                raise ValueError(
                    f"{flag_of(name)} {getattr(run, name)} is not supported with the sparse "
                    f"attention of {model.name}; use {only}"
                )
        ring = ALGORITHMS.get(run.algorithm)
        if run.side == "query" or (ring is not None and not ring.keeps):
            raise ValueError(
                f"--algorithm {run.algorithm} --side {run.side}: the sparse attention of "
                f"{model.name} sends keys, not queries; use --algorithm burst or multicast, and "
                "--side kv"
            )
    if not fits(run.ulysses):
        raise ValueError(
            f"--ulysses {run.ulysses}: ranks that share heads must divide --cp {run.cp} and the "
            f"{heads} query and {kv_heads} key/value heads of a rank of --tp {run.tp}; use "
            f"{_one_of([*filter(fits, range(1, run.cp + 1))])}"
        )
    if run.algorithm == "ulysses" and run.ulysses != run.cp:
        raise ValueError(
            f"--algorithm ulysses splits heads across all --cp {run.cp} ranks, got --ulysses "
            f"{run.ulysses}; use --ulysses {run.cp}, or --algorithm hybrid"
        )
    if run.algorithm == "hybrid" and run.ulysses == 1 < run.cp:
        raise ValueError(
            "--algorithm hybrid requires ranks that share heads, got --ulysses 1; use --ulysses 2"
        )
    here = max(1, kv_heads // run.ulysses)
    if here % run.head_chunks:
        raise ValueError(
            f"--head-chunks {run.head_chunks} does not divide the {here} key/value heads that a "
            f"rank computes; use {_one_of(divisors(here))}"
        )


def _check_hybrid(model: Model, run: Settings) -> None:
    """Raise ValueError for settings that hybrid attention does not support.

    Tensor-parallel ranks must share the output groups equally. A context-parallel rank must have
    all rows from which each of its compressed keys is computed.
    """
    assert model.hybrid is not None
    if run.layout not in ("zigzag", "contiguous"):
        raise ValueError(
            f"--layout {run.layout} puts the rows of a compressed key of {model.name} on several "
            "ranks; use zigzag or contiguous"
        )
    if run.wire != "fp32":
        raise ValueError(
            f"--wire {run.wire}: the hybrid attention of {model.name} sends gradients in fp32; use "
            "--wire fp32"
        )
    if model.hybrid.groups % run.tp:
        raise ValueError(
            f"--tp {run.tp} does not divide the {model.hybrid.groups} output groups of "
            f"{model.name}; use {_one_of(divisors(model.hybrid.groups))}"
        )
    unit = 2 * run.cp * model.key_rows
    if run.seq % unit:
        near = max(1, round(run.seq / unit)) * unit
        raise ValueError(
            f"--seq {run.seq} is not a multiple of {unit} (2 x --cp {run.cp} x {model.key_rows} "
            f"rows of a compressed key of {model.name}); use {near}"
        )


def _check_kind(model: Model, run: Settings, kind: str, algorithm: str) -> None:
    """Raise ValueError if a kind of layer cannot have its own attention algorithm."""
    name = {WINDOW: "window_algorithm", CHUNKED: "chunk_algorithm"}[kind]
    field_text = f"{name} {algorithm}"
    if algorithm not in ALGORITHMS:
        raise ValueError(f"{field_text}: must be one of {', '.join(ALGORITHMS)}")
    if kind not in model.kinds:
        raise ValueError(f"{field_text}: {model.name} has no {kind} layers; remove {name}")
    if run.cp == 1 or run.ulysses == run.cp:
        sizes = "--cp 1" if run.cp == 1 else f"--ulysses {run.ulysses} (equal to --cp)"
        fix = "--cp above 1" if run.cp == 1 else f"--ulysses below {run.cp}"
        raise ValueError(
            f"{field_text} requires ranks that form a ring, got {sizes}; use {fix}, or remove "
            f"{name}"
        )


def _check_mixer(model: Model, run: Settings) -> None:
    """Raise ValueError if ranks cannot share the heads of linear-attention layers equally.

    The context-parallel size matters only with `linear="megatron"`, which exchanges heads. Other
    algorithms send states and support any context-parallel size.
    """
    mixer, shared = model.mixer, run.linear == "megatron" and run.cp > 1
    if mixer is None or model.carried(run.tp, run.cp if shared else 1):
        return
    keys = f" and {mixer.key_heads} of keys" if mixer.key_heads else ""
    heads_text = f"the {mixer.heads} heads{keys} of {model.name}'s {mixer.name} layers"
    if shared and mixer.shares(run.tp):
        raise ValueError(
            f"--linear megatron: --tp {run.tp} x --cp {run.cp} ranks cannot share {heads_text} "
            "equally; use --linear auto, which supports any --cp"
        )
    good = [n for n in range(1, mixer.heads + 1) if model.heads % n == 0 and mixer.shares(n)]
    raise ValueError(f"--tp {run.tp} does not divide {heads_text}; use {_one_of(good)}")

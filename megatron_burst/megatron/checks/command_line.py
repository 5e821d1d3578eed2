# SPDX-License-Identifier: Apache-2.0
"""Checks of a Megatron-LM command line, after its arguments are parsed.

Some settings exist only on a command line: the number of ranks, packed batches, a yaml file. All
other checks read the parsed arguments like a `TransformerConfig`. One error reports all problems,
before the script makes process groups or models.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from ... import flags
from ...config import BurstConfig
from .. import patching
from ..model_shape import ModelShape
from ..selection import splits_with_burst, uses_burst
from .config import HIDDEN_STATES, configuration_problems
from .features import UNTESTED_FSDP
from .layer_lists import mixed
from .problem import ConfigView, Problem, Rule, broken, excluded
from .sparse import gathers
from .splitting import LINEAR_FLAG, SCRIPT

RESET, INTER_DOCUMENT = "--reset-attention-mask", "--dataloader-inter-document-masking"
# Further flags of Megatron-LM that make packed batches.
PACKED = ("--sft", INTER_DOCUMENT)
# Flags that select a kernel for the same attention; ordinary launch scripts contain them.
_KERNELS = ("--attention-backend", "--flash-attention-version", "--use-flash-attn")


def _splits(settings: Any, burst: BurstConfig) -> bool:
    """Return whether BurstAttention splits micro-batches over ranks; False for an invalid size."""
    size = settings.context_parallel_size
    return type(size) is int and size >= 1 and splits_with_burst(settings, burst)


_CUDA_ONLY = ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph", "use_megatron_fsdp")
# Features that need a GPU and have no replacement with `--cpu`.
_WITHOUT_CUDA = (
    *excluded(
        "{other} {why}, which --cpu does not use",
        use_torch_fsdp2="shards a model over CUDA devices",
        use_megatron_fsdp="shards a model over CUDA devices",
        enable_cuda_graph="records CUDA kernels",
        external_cuda_graph="records CUDA kernels",
    ),
    Rule(
        lambda c, b: c.cuda_graph_impl not in (None, "none"),
        "--cuda-graph-impl {c.cuda_graph_impl} records CUDA kernels, which --cpu does not use",
        remove=("--cuda-graph-impl",),
    ),
)


def problems(
    settings: Any, burst: BurstConfig, argv: list[str], errors: Sequence[str] = ()
) -> Iterator[Problem]:
    """Yield all problems of parsed arguments.

    Args:
        settings: parsed arguments under the names of a `TransformerConfig`.
        burst: the options of the run.
        argv: the words of the command line.
        errors: messages about wrong values, which `burst` does not contain.

    Yields:
        The problems.
    """
    splits_here = _splits(settings, burst)
    if patching.installed("cpu"):
        yield from broken(_WITHOUT_CUDA, settings)
        # So that no other check reports the same problem.
        settings = SimpleNamespace(**vars(settings) | dict.fromkeys(_CUDA_ONLY))
    if splits_here or any(flags.present(argv)):
        yield from yaml_problems(settings)
    yield from map(Problem, errors)
    seq_length = getattr(settings, "seq_length", None)
    yield from configuration_problems(settings, burst, seq_length)
    if burst.algorithm == flags.OFF:
        return
    engine = importlib.util.find_spec("transformer_engine") is not None
    if getattr(settings, "transformer_impl", None) == "transformer_engine" and not engine:
        yield Problem(
            "--transformer-impl is transformer_engine, and Transformer Engine is not installed",
            add=("--transformer-impl local",),
        )
    if not splits_here:
        return
    yield from _world(settings)
    # Megatron's own sparse attention requires --cp-comm-type, so ordinary launch scripts have it.
    accepted = ModelShape.of(settings).sparse_setting is not None and gathers(settings)
    accepted = accepted or mixed(getattr(settings, "cp_comm_type", None))  # reported already
    for name in () if accepted else flags.present(argv, "--cp-comm-type"):
        yield Problem(
            f"{name} chooses how Megatron's own attention exchanges keys and values, and "
            f"--context-parallel-algo {burst.algorithm} replaces that attention",
            remove=(name,),
        )
    yield from run_problems(settings, burst, engine)


def run_problems(settings: Any, burst: BurstConfig, engine: bool) -> Iterator[Problem]:
    """Yield problems of settings that exist only in a training run, not in a model.

    They concern documents, groups per micro-batch, the distributed backend, the sharding of
    parameters, and hybrid models without Transformer Engine.

    Args:
        settings: parsed arguments under the names of a `TransformerConfig`.
        burst: the options of the run.
        engine: whether Transformer Engine is installed.

    Yields:
        The problems.
    """
    yield from broken(SCRIPT, settings)
    yield from broken(_BACKEND, settings, burst)
    yield from _packed(settings, burst)
    if getattr(settings, "reset_attention_mask", False):
        yield from broken(_DOCUMENTS, settings, flag=RESET)
    if not engine and not patching.installed("cpu"):  # `--cpu` uses local layers
        yield from broken(_WITHOUT_ENGINE, settings)


def yaml_problems(settings: Any) -> Iterator[Problem]:
    """Yield a problem if a yaml file is set, with which Megatron-LM itself cannot train."""
    yaml = getattr(settings, "yaml_cfg", None)
    if yaml:
        yield Problem(
            f"--yaml-cfg {yaml}: Megatron-LM cannot train from a yaml file: it requires "
            "account_for_embedding_in_pipeline_split both at the top level and in language_model, "
            "and then fails because the entry is in both; use flags instead",
            remove=("--yaml-cfg",),
        )


def _world(settings: Any) -> Iterator[Problem]:
    world, cp = getattr(settings, "world_size", None), settings.context_parallel_size
    tp = settings.tensor_model_parallel_size
    pp = getattr(settings, "pipeline_model_parallel_size", None) or 1
    if world is None or world % (tp * pp * cp) == 0:
        return
    other_sizes = "".join(
        f" x --{name}-model-parallel-size {size}"
        for name, size in (("tensor", tp), ("pipeline", pp))
        if size > 1
    )
    reason = (
        f"--context-parallel-size {cp}{other_sizes} does not divide the {world} ranks of this run"
    )
    fitting = [size for size in range(2, cp) if world % (tp * pp * size) == 0]
    if fitting and not getattr(settings, "hierarchical_context_parallel_sizes", None):
        yield Problem(reason, add=(f"--context-parallel-size {fitting[-1]}",))
    else:
        yield Problem(f"{reason}: start a multiple of {tp * pp * cp} ranks, or change the sizes")


def _value_of(settings: Any, flag: str) -> Any:
    return getattr(settings, flag.removeprefix("--").replace("-", "_"), None)


def _packed(settings: Any, burst: BurstConfig) -> Iterator[Problem]:
    """Yield the settings that do not work with packed batches."""
    packs = [flag for flag in (*PACKED, RESET) if _value_of(settings, flag)]
    if not packs:
        return
    if _value_of(settings, "--mtp-hsm"):
        reason = f"--mtp-hsm does not work with {packs[0]}: {HIDDEN_STATES}"
        yield Problem(reason, remove=("--mtp-hsm",))
    rope = getattr(settings, "position_embedding_type", None) == "rope"
    rope = rope or getattr(settings, "use_rotary_position_embeddings", False)
    repacked = burst.pack != "off"  # repacking removes the padding of --sft
    fused = rope and getattr(settings, "apply_rope_fusion", False)
    if fused and (repacked or packs[0] != "--sft"):
        yield Problem(
            f"fused rope does not work with {packs[0]}{' and --burst-pack' if repacked else ''}: "
            "it requires documents of a multiple of 2 x --context-parallel-size tokens",
            add=("--no-rope-fusion",),
        )


def _linear_layers(c: ConfigView, _: BurstConfig) -> str | None:
    return None if c.hybrid_layer_pattern else ModelShape.of(c).linear_setting


# Settings with which `--reset-attention-mask` cannot be turned into documents.
_DOCUMENTS = (
    Rule(lambda c, b: not c.has("dataloader_inter_document_masking"),
         "{flag}: this Megatron-LM does not pass documents to attention; install Megatron-Core "
         "0.19 or newer",
         remove=(RESET,)),
    Rule(lambda c, b: c.has("dataloader_inter_document_masking") and (c.micro_batch_size or 1) > 1,
         "{flag} at --micro-batch-size {c.micro_batch_size}: attention to documents supports one "
         "sequence per micro-batch", add=("--micro-batch-size 1",)),
    # Megatron may validate arguments twice: the first validation sets this field for {flag}.
    Rule(lambda c, b: c.dataloader_inter_document_masking
         and patching.run_state().documents != RESET,
         f"{{flag}} ends documents after end-of-document tokens, and {INTER_DOCUMENT} ends them at "
         "the dataset's boundaries; use one of the flags (Megatron-LM itself ignores {flag})",
         remove=(RESET,)),
    *excluded(
        "{flag} does not work with {other}, which {why}",
        (RESET,),
        fim_data="moves tokens between documents",
        sft="defines documents already",
        hybrid_layer_pattern="has layers whose state would be reset at the start of each document",
    ),
    Rule(_linear_layers,
         "{flag} does not work with {value}: the state of these layers would be reset at the start "
         "of each document",
         remove=(RESET,)),
)  # fmt: skip
# Settings of communicators that the backend does not support.
_BACKEND = (
    Rule(lambda c, b: b.nccl_max_ctas is not None and c.distributed_backend
         and "nccl" not in c.distributed_backend,
         "--burst-nccl-max-ctas {b.nccl_max_ctas} has an effect only with NCCL, and "
         "--distributed-backend is {c.distributed_backend}", remove=("--burst-nccl-max-ctas",)),
    Rule("use_megatron_fsdp", f"--use-megatron-fsdp {UNTESTED_FSDP}",
         add=("--use-torch-fsdp2",), remove=("--use-megatron-fsdp",)),
)  # fmt: skip
# Megatron's own hybrid stack requires Transformer Engine for attention.
_WITHOUT_ENGINE = (
    Rule(lambda c, b: "*" in (c.hybrid_layer_pattern or "")
         and str((c.spec or ["megatron.core"])[0]).startswith("megatron."),
         "--hybrid-layer-pattern {c.hybrid_layer_pattern} has attention (*), which in Megatron's "
         "hybrid stack requires Transformer Engine; install Transformer Engine, which is missing, "
         "or train with pretrain_gpt.py"),
)  # fmt: skip


def idle(settings: Any, burst: BurstConfig, argv: list[str]) -> str | None:
    """Return a log line about flags that have no effect; None if every flag has an effect.

    Args:
        settings: parsed arguments under the names of a `TransformerConfig`, without problems.
        burst: the options of the run.
        argv: the words of the command line.
    """
    algorithm = f"--context-parallel-algo {burst.algorithm}"
    if burst.algorithm == flags.OFF:
        unused = [name for name in flags.present(argv) if name not in flags.ALONE]
        if unused:
            return f"{', '.join(unused)} have no effect without --context-parallel-algo burst"
    elif not uses_burst(settings, burst):
        return (
            f"{algorithm} has no effect at --context-parallel-size 1: Megatron's own attention runs"
        )
    elif burst.linear != "auto" and ModelShape.of(settings).linear_setting is None:
        return (
            f"{LINEAR_FLAG} {burst.linear} has no effect: the model has no linear-attention or "
            "Mamba layers"
        )
    else:
        unused = [name for flag in _KERNELS for name in flags.present(argv, flag)]
        if unused:
            return (
                f"{', '.join(unused)} choose a kernel of Megatron's own attention, which "
                f"{algorithm} replaces: use --burst-kernel"
            )
    return None

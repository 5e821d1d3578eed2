# SPDX-License-Identifier: Apache-2.0
"""Problems of a Megatron-LM command line, found when its arguments are parsed.

Some problems only a command line has: the number of ranks, packed batches, a yaml file. The others
are found by reading parsed arguments like a `TransformerConfig`. One error reports all of them
before anything is built.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from ... import flags
from ...config import BurstConfig
from .. import patching
from ..model_shape import PATTERNS, ModelShape
from .config import HIDDEN_STATES, configuration_problems
from .features import UNTESTED_FSDP
from .layer_lists import mixed
from .problem import ConfigView, Problem, Rule, broken, excluded
from .sparse import gathers
from .splitting import FLAG as LINEAR
from .splitting import SCRIPT, splits

RESET, INTER_DOCUMENT = "--reset-attention-mask", "--dataloader-inter-document-masking"
DOCUMENTS = "documents of the data loader"  # note: the flag that asks for them, None if none does
# Further flags of Megatron-LM that make packed batches.
PACKED = ("--sft", INTER_DOCUMENT)
# Which kernel computes the same attention; ordinary launch scripts contain these.
_KERNELS = ("--attention-backend", "--flash-attention-version", "--use-flash-attn")


def settings_of(args: Any) -> SimpleNamespace:
    """Parsed arguments under the names of a `TransformerConfig`.

    With a yaml file the arguments have sections, whose entries are read like the others.
    """
    sections = (getattr(args, name, None) for name in ("language_model", "model_parallel"))
    given = {k: x for section in sections if section is not None for k, x in vars(section).items()}
    given |= vars(args)
    if "num_query_groups" in given and not given.get("group_query_attention", True):
        given["num_query_groups"] = None
    if given.get("recompute_activations"):
        given["recompute_granularity"] = "selective"
    given["is_hybrid_model"] = any(given.get(name) for name in PATTERNS)
    for name in ("num_attention_heads", "num_query_groups"):
        given.setdefault(name, None)
    for name in ("context_parallel_size", "tensor_model_parallel_size"):
        given.setdefault(name, 1)
    return SimpleNamespace(**given)


def takes_over(args: Any) -> bool:
    """Whether BurstAttention will run with these arguments (completed by `flags.settle`)."""
    settings = settings_of(args)
    cp = settings.context_parallel_size
    split = type(cp) is int and cp >= 1 and splits(settings)
    return args.context_parallel_algo != flags.OFF and split


# Features that need a GPU, for which `--cpu` has no replacement.
_WITHOUT_CUDA = (
    *excluded(
        "{other} {why}, and --cpu has none",
        use_torch_fsdp2="shards a model for CUDA devices",
        use_megatron_fsdp="shards a model for CUDA devices",
        enable_cuda_graph="records CUDA kernels",
        external_cuda_graph="records CUDA kernels",
    ),
    Rule(
        lambda c, b: c.cuda_graph_impl not in (None, "none"),
        "--cuda-graph-impl {c.cuda_graph_impl} records CUDA kernels, and --cpu has none",
        remove=("--cuda-graph-impl",),
    ),
)


def problems(args: Any, argv: list[str]) -> Iterator[Problem]:
    """All problems of arguments completed by `flags.settle`; argv: the command line as given."""
    settings = settings_of(args)
    if patching.installed("cpu"):
        yield from broken(_WITHOUT_CUDA, settings)
        for name in (
            "cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph", "use_megatron_fsdp",
        ):  # fmt: skip
            setattr(settings, name, None)  # so that no other check tells of them again
    if takes_over(args) or any(flags.present(argv)):
        yield from yaml_problems(settings)
    burst, wrong = flags.choices(args)
    yield from map(Problem, wrong)
    seq_length = getattr(settings, "seq_length", None)
    yield from configuration_problems(settings, burst, seq_length)
    if burst.algorithm == flags.OFF:
        return
    engine = importlib.util.find_spec("transformer_engine") is not None
    if getattr(settings, "transformer_impl", None) == "transformer_engine" and not engine:
        yield Problem(
            "--transformer-impl transformer_engine, and Transformer Engine is not installed",
            add=("--transformer-impl local",),
        )
    if not takes_over(args):
        return
    yield from _world(settings)
    # What Megatron asks for where its own sparse attention runs, ordinary launch scripts have.
    fits = ModelShape.of(settings).sparse_setting is not None and gathers(settings)
    fits = fits or mixed(getattr(settings, "cp_comm_type", None))  # refused already
    for name in () if fits else flags.present(argv, "--cp-comm-type"):
        yield Problem(
            f"{name} chooses how Megatron's own attention exchanges keys and values, and "
            f"--context-parallel-algo {burst.algorithm} replaces that attention",
            remove=(name,),
        )
    yield from run_problems(settings, burst, engine)


def run_problems(settings: Any, burst: BurstConfig, engine: bool) -> Iterator[Problem]:
    """Problems of documents, of hybrid models, of groups that change with the micro-batch, of the
    backend that moves tensors, and of what shards parameters.

    engine: whether Transformer Engine is installed.
    """
    yield from broken(SCRIPT, settings)
    yield from broken(_BACKEND, settings, burst)
    yield from _packed(settings, burst)
    if getattr(settings, "reset_attention_mask", False):
        yield from broken(_DOCUMENTS, settings, flag=RESET)
    if not engine and not patching.installed("cpu"):  # which has local layers
        yield from broken(_WITHOUT_ENGINE, settings)


def yaml_problems(settings: Any) -> Iterator[Problem]:
    """Unless the arguments are flags: Megatron-LM itself fails with a yaml file."""
    yaml = getattr(settings, "yaml_cfg", None)
    if yaml:
        yield Problem(
            f"--yaml-cfg {yaml}: Megatron-LM itself cannot train from such a file: it asks for "
            "account_for_embedding_in_pipeline_split both at the top level and in language_model, "
            "and then fails because it is in both; give flags instead",
            remove=("--yaml-cfg",),
        )


def _world(settings: Any) -> Iterator[Problem]:
    world, cp = getattr(settings, "world_size", None), settings.context_parallel_size
    tp = settings.tensor_model_parallel_size
    pp = getattr(settings, "pipeline_model_parallel_size", None) or 1
    if world is None or world % (tp * pp * cp) == 0:
        return
    others = "".join(
        f" x --{name}-model-parallel-size {size}"
        for name, size in (("tensor", tp), ("pipeline", pp))
        if size > 1
    )
    reason = f"--context-parallel-size {cp}{others} does not divide the {world} ranks of this run"
    fitting = [n for n in range(2, cp) if world % (tp * pp * n) == 0]
    if fitting and not getattr(settings, "hierarchical_context_parallel_sizes", None):
        yield Problem(reason, add=(f"--context-parallel-size {fitting[-1]}",))
    else:
        yield Problem(f"{reason}: start a multiple of {tp * pp * cp}, or change the sizes")


def _asks(settings: Any, flag: str) -> Any:
    return getattr(settings, flag.removeprefix("--").replace("-", "_"), None)


def _packed(settings: Any, burst: BurstConfig) -> Iterator[Problem]:
    """Settings that do not work with packed batches."""
    packs = [flag for flag in (*PACKED, RESET) if _asks(settings, flag)]
    if not packs:
        return
    if _asks(settings, "--mtp-hsm"):
        yield Problem(f"--mtp-hsm with {packs[0]}: {HIDDEN_STATES}", remove=("--mtp-hsm",))
    rope = getattr(settings, "position_embedding_type", None) == "rope"
    rope = rope or getattr(settings, "use_rotary_position_embeddings", False)
    anew = burst.pack != "off"  # and documents lose the padding that --sft gave them
    fused = rope and getattr(settings, "apply_rope_fusion", False)
    if fused and (anew or packs[0] != "--sft"):
        yield Problem(
            f"{packs[0]}{' and --burst-pack' if anew else ''} with fused rope, which supports only "
            "documents of multiples of 2 x --context-parallel-size tokens",
            add=("--no-rope-fusion",),
        )


def _linear_layers(c: ConfigView, _: BurstConfig) -> str | None:
    return None if c.hybrid_layer_pattern else ModelShape.of(c).linear_setting


# Settings with which `--reset-attention-mask` cannot be turned into documents.
_DOCUMENTS = (
    Rule(lambda c, b: not c.has("dataloader_inter_document_masking"),
         "{flag}: this Megatron-LM hands no documents to attention, which 0.19 does",
         remove=(RESET,)),
    Rule(lambda c, b: c.has("dataloader_inter_document_masking") and (c.micro_batch_size or 1) > 1,
         "{flag} at --micro-batch-size {c.micro_batch_size}: the rows of a batch have documents of "
         "their own, and attention takes one row", add=("--micro-batch-size 1",)),
    # Unless validation of the same arguments has set it for the documents of the other flag.
    Rule(lambda c, b: c.dataloader_inter_document_masking
         and patching.notes().get(DOCUMENTS) != RESET,
         f"{{flag}} with {INTER_DOCUMENT}: documents would end after end-of-document tokens or "
         "where those of the dataset end; choose one of the two (Megatron-LM ignores {flag})",
         remove=(RESET,)),
    *excluded(
        "{flag} with {other}, which {why}",
        (RESET,),
        fim_data="moves tokens between documents",
        sft="has documents already",
        hybrid_layer_pattern="has layers whose state documents would reset",
    ),
    Rule(_linear_layers,
         "{flag} with {value}: documents would reset the state of its layers too",
         remove=(RESET,)),
)  # fmt: skip
# What is asked of communicators that the backend does not have.
_BACKEND = (
    Rule(lambda c, b: b.nccl_max_ctas is not None and c.distributed_backend
         and "nccl" not in c.distributed_backend,
         "--burst-nccl-max-ctas {b.nccl_max_ctas} limits kernels of NCCL, and "
         "--distributed-backend is {c.distributed_backend}", remove=("--burst-nccl-max-ctas",)),
    Rule("use_megatron_fsdp", f"--use-megatron-fsdp {UNTESTED_FSDP}",
         add=("--use-torch-fsdp2",), remove=("--use-megatron-fsdp",)),
)  # fmt: skip
# Attention of Megatron's hybrid stack, in a spec of Megatron's.
_WITHOUT_ENGINE = (
    Rule(lambda c, b: "*" in (c.hybrid_layer_pattern or "")
         and str((c.spec or ["megatron.core"])[0]).startswith("megatron."),
         "--hybrid-layer-pattern {c.hybrid_layer_pattern} has attention (*), whose layers in "
         "Megatron's hybrid stack need Transformer Engine, which is not installed: install it, or "
         "train with pretrain_gpt.py"),
)  # fmt: skip


def idle(args: Any, argv: list[str]) -> str | None:
    """A line about flags that have no effect, if these arguments have some."""
    ours = f"--context-parallel-algo {args.context_parallel_algo}"
    if args.context_parallel_algo == flags.OFF:
        alone = [name for name in flags.present(argv) if name not in flags.ALONE]
        if alone:
            return f"{', '.join(alone)} have no effect without --context-parallel-algo burst"
    elif not takes_over(args):
        return f"{ours} does nothing at --context-parallel-size 1: Megatron's own attention runs"
    elif _asks(args, LINEAR) not in (None, "auto") and (
        ModelShape.of(settings_of(args)).linear_setting is None
    ):
        return f"{LINEAR} {_asks(args, LINEAR)} has no effect: no layer carries a state"
    else:
        theirs = [name for flag in _KERNELS for name in flags.present(argv, flag)]
        if theirs:
            return (
                f"{', '.join(theirs)} choose a kernel of Megatron's own attention, which {ours} "
                "replaces: --burst-kernel chooses the kernel that runs"
            )
    return None

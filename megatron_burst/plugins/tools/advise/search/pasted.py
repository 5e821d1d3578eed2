# SPDX-License-Identifier: Apache-2.0
"""Settings of a run as command-line flags of Megatron-LM and of this package.

This module converts `Settings` to flags, and `model_flags` converts the model.
`tools.model_arguments` parses the flags. Tests check that it returns the same settings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from .....config import FIELDS, flag_of
from .....options import KERNELS
from ..settings import Settings
from ..shapes.model import POSITIONS, STRUCTURE, Model
from .model_flags import (
    carries_state,
    hybrid_flags,
    is_hybrid,
    model_flags,
)


def flags_of(model: Model, run: Settings, cut: str = "") -> list[str]:
    """Return all flags for `megatron-burst pretrain SCRIPT`, quoted for a shell.

    SCRIPT is `script_of(model)`. Each entry is one flag with its values. `model_flags.lacking`
    lists properties of the model that no flag sets.

    Args:
        model: Shape of the model.
        run: Settings of the run.
        cut: Layout of packed documents; "" without packed documents.
    """
    return [*model_flags(model, run.pp * run.vpp), *_beside(model, run, cut)]


def run_flags(model: Model, run: Settings, cut: str = "") -> list[str]:
    """Return the flags of a run, without the flags of the model.

    They set the sequence length, parallel sizes, batch sizes, and options of Megatron-LM and this
    package. The layer pattern of a HybridModel is included if it marks pipeline stages.

    Args:
        model: Shape of the model.
        run: Settings of the run.
        cut: Layout of packed documents; "" without packed documents.
    """
    stages = run.pp * run.vpp
    marked = list(hybrid_flags(model, stages))[:1] if is_hybrid(model) and stages > 1 else []
    return [*marked, *_beside(model, run, cut)]


def _beside(model: Model, run: Settings, cut: str) -> list[str]:
    token_loss = ["--calculate-per-token-loss"] * bool(cut)  # ranks have unequal numbers of tokens
    # For latent attention and for documents, fused rope assumes Megatron's layout of rows.
    unfused_rope = ["--no-rope-fusion"] * (model.latent is not None or cut != "")
    groups = group_flags(model, run)
    own_flags = burst_flags(run, cut, carries_state(model))
    return [*groups, *training_flags(run), *unfused_rope, *token_loss, *own_flags]


# Layout of packs -> what the user must add.
DOCUMENTS = {
    "balanced": "and a data loader that marks the ends of documents: --sft or "
    "--dataloader-inter-document-masking",
    "zigzag": "and --sft, which pads every document to a multiple of 2 x CP: --seq-length counts "
    "the padding",
}


def left_to_the_user(model: Model, included: Sequence[str] = ()) -> str:
    """Return a sentence that lists the flags that the user must add, except those in `included`."""
    names = ["data", "tokenizer", "learning rate", "--train-iters", "checkpoints"]
    names = [name for name in names if name not in included]
    if model.family is None:
        names += [POSITIONS, STRUCTURE]
    elif model.family.left:
        names.append(model.family.left)
    return f"Not included: {', '.join(names)}"


def group_flags(model: Model, run: Settings) -> Iterator[str]:
    """Yield flags for sequence length, parallel sizes and batch sizes.

    Virtual stages of a HybridModel have no flag; its layer pattern marks them.
    """
    yield f"--seq-length {run.seq} --max-position-embeddings {run.seq}"
    sequence = " --sequence-parallel" if run.tp > 1 else ""
    yield f"--tensor-model-parallel-size {run.tp}{sequence}"
    yield f"--pipeline-model-parallel-size {run.pp}"
    for end, layers in (("first", run.first_layers), ("last", run.last_layers)):
        if layers is not None:
            yield f"--decoder-{end}-pipeline-num-layers {layers}"
    if run.vpp > 1 and not is_hybrid(model):
        yield f"--num-virtual-stages-per-pipeline-rank {run.vpp}"
    yield f"--context-parallel-size {run.cp}"
    yield from _expert_groups(model, run)
    yield f"--micro-batch-size {run.micro_batch}"
    yield f"--global-batch-size {run.micro_batch * run.micro_batches * run.dp}"
    intra = math.gcd(run.intra or run.cp, run.cp)
    if 1 < intra < run.cp:
        yield f"--hierarchical-context-parallel-sizes {intra} {run.cp // intra}"


def _expert_groups(model: Model, run: Settings) -> Iterator[str]:
    """Yield flags for expert parallelism.

    Megatron cannot split experts with biases over tensor-parallel ranks. Such experts are
    distributed whole over the tensor- and expert-parallel ranks, with the same memory per rank.
    """
    biases = model.family.biases if model.family is not None else model.sinks
    ep = run.ep
    if biases and model.experts and run.tp > 1:
        yield "--expert-tensor-parallel-size 1"
        ep = math.gcd(run.ep * run.tp, model.experts)
    if ep > 1:
        yield f"--expert-model-parallel-size {ep}"


def training_flags(run: Settings) -> Iterator[str]:
    """Yield flags for precision, recomputation, sharding and offloading by Megatron-LM itself."""
    yield "--bf16 --attention-dropout 0 --hidden-dropout 0"
    yield "--no-create-attention-mask-in-dataloader"
    if run.path == "cpu":
        yield "--transformer-impl local"
    if run.gradients == "bf16":
        yield "--grad-reduce-in-bf16"
    if run.distributed_optimizer:
        several = run.dp * run.cp > 1
        overlap = " --overlap-grad-reduce --overlap-param-gather" if several else ""
        yield f"--use-distributed-optimizer{overlap}"
    if run.recompute == "full":
        yield "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    if run.optimizer_offload:
        yield "--optimizer-cpu-offload --use-precision-aware-optimizer"
        yield "--overlap-cpu-optimizer-d2h-h2d"
        yield f"--optimizer-offload-fraction {run.optimizer_offload:g}"


def burst_flags(run: Settings, cut: str = "", carries: bool = False) -> list[str]:
    """Return the flags of this package that select the settings of `run`; see `choices`."""
    return [f"{flag_of(name)} {value}" for name, value in choices(run, cut, carries).items()]


def choices(run: Settings, cut: str = "", carries: bool = False) -> dict[str, Any]:
    """Return the fields of `BurstConfig` to set for a run: name -> value.

    They are the fields that differ from their defaults, the algorithm, and with `carries` the
    algorithm of linear attention.

    Args:
        run: Settings of the run.
        cut: Layout of packed documents; "" without packed documents.
        carries: Whether the model has linear-attention layers.
    """
    parallel = run.cp > 1
    fields: dict[str, Any] = {
        "algorithm": ("auto" if run.by_kind else run.algorithm) if parallel else "megatron",
        # A cluster file may contain a description instead of the name of a kernel.
        "kernel": run.kernel if parallel and run.kernel in KERNELS else "auto",
        "layout": run.layout if parallel and not cut else FIELDS["layout"].default,
        "side": run.side if parallel else "auto",
        "ulysses_size": run.ulysses if parallel and run.ulysses not in (1, run.cp) else None,
        "placement": run.placement if parallel and 1 < run.ulysses < run.cp else "head_first",
        "wire_dtype": "bf16" if parallel and run.wire == "bf16" else None,
        "store": run.store if parallel and run.store else None,
        "lm_head_loss": run.lm_head_loss,
    }
    of_plugins = ("offload", "sequence_chunks", "mlp_tiles")
    fields |= {name: getattr(run, name) for name in of_plugins if name in FIELDS}
    if cut == "balanced":
        fields["pack"] = "documents"
    if parallel and carries:
        fields["linear"] = run.linear
    if parallel and run.head_chunks > 1:
        fields["head_chunks"] = run.head_chunks
    stated = {
        name: value
        for name, value in fields.items()
        if name in ("algorithm", "head_chunks", "linear")
        or (name == "layout" and cut == "zigzag")  # the default of a partial store is striped
        or value != FIELDS[name].default
    }
    return {name: f"{v:g}" if isinstance(v, float) else v for name, v in stated.items()}

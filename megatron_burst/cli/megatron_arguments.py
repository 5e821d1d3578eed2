"""The model and the run that the flags of a Megatron command describe.

Only flags that memory or time depend on are read; all others pass, as in `doctor`. Our own flags
have the names and defaults of `flags`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from .. import flags
from ..advisor.shapes.megatron_model import model_from
from ..advisor.shapes.models import Model, padded
from ..config import BurstConfig
from ..megatron.checks.config import ulysses_size
from ..recompute import tile_counts

NUMBERS: dict[str, int | None] = {
    "--num-layers": None, "--hidden-size": None, "--ffn-hidden-size": None,
    "--num-attention-heads": None, "--num-query-groups": 1, "--kv-channels": None,
    "--seq-length": None, "--micro-batch-size": 1, "--global-batch-size": None,
    "--tensor-model-parallel-size": 1, "--pipeline-model-parallel-size": 1,
    "--context-parallel-size": 1, "--expert-model-parallel-size": 1,
    "--num-virtual-stages-per-pipeline-rank": None, "--num-layers-per-virtual-pipeline-stage": None,
    "--vocab-size": None, "--make-vocab-size-divisible-by": 128, "--num-experts": None,
    "--moe-router-topk": 2, "--moe-ffn-hidden-size": None,
    "--moe-shared-expert-intermediate-size": None, "--mtp-num-layers": None,
    "--q-lora-rank": None, "--kv-lora-rank": 512, "--qk-head-dim": 128, "--v-head-dim": 128,
    "--qk-pos-emb-head-dim": 64, "--mamba-num-heads": None, "--mamba-head-dim": 64,
    "--mamba-state-dim": 128, "--mamba-num-groups": 8, "--linear-conv-kernel-dim": 4,
    "--linear-key-head-dim": 128, "--linear-value-head-dim": 128, "--linear-num-key-heads": 16,
    "--linear-num-value-heads": 32,
}  # fmt: skip
TEXTS = (
    "--window-size", "--window-attn-skip-freq", "--moe-layer-freq", "--hybrid-override-pattern",
    "--hybrid-layer-pattern", "--linear-attention-freq", "--softmax-type",
    "--recompute-granularity",
)  # fmt: skip
SWITCHES = (
    "--swiglu", "--untie-embeddings-and-output-weights", "--group-query-attention",
    "--use-distributed-optimizer", "--optimizer-cpu-offload", "--grad-reduce-in-bf16",
    "--multi-latent-attention", "--attention-output-gate", "--use-megatron-fsdp",
    "--use-torch-fsdp2",
)  # fmt: skip
# Counted so where left to the run, and pieces of no fewer rows than the run would take.
AUTO = {"offload": 1.0, "sequence_chunks": 32, "mlp_tiles": 64}
FEWEST_ROWS = {"sequence_chunks": tile_counts.FEWEST_ROWS, "mlp_tiles": tile_counts.LEAST}


def read(words: Sequence[str]) -> tuple[Model, dict[str, Any]]:
    """The model, and fields of `Settings`. ValueError naming the flag that is missing or wrong."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name, default in NUMBERS.items():
        parser.add_argument(name, type=int, default=default)
    for name in TEXTS:
        parser.add_argument(name)
    for name in SWITCHES:
        parser.add_argument(name, action="store_true")
    parser.add_argument("--hierarchical-context-parallel-sizes", type=int, nargs="+")
    parser.add_argument("--transformer-impl", default="transformer_engine")
    parser.add_argument("--optimizer-offload-fraction", type=float, default=1.0)
    flags.add_flags(parser, algorithm="burst")
    try:
        args, _ = parser.parse_known_args(list(words))
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from None
    model = _model(args)
    if args.seq_length is None:
        raise ValueError("--seq-length is missing in the Megatron command; add it")
    flags.settle(args)
    return model, _fields(args)


def _model(args: argparse.Namespace) -> Model:
    if not args.group_query_attention:
        args.num_query_groups = None
    model = model_from(
        lambda name: getattr(args, name, None),
        "the Megatron command",
        gated=args.swiglu,
        tied=not args.untie_embeddings_and_output_weights,
        flag=lambda name: f"--{name.replace('_', '-')}",
    )
    return padded(model, args.make_vocab_size_divisible_by * args.tensor_model_parallel_size)


def _fields(args: argparse.Namespace) -> dict[str, Any]:
    pp, vpp = args.pipeline_model_parallel_size, args.num_virtual_stages_per_pipeline_rank or 1
    if args.num_layers_per_virtual_pipeline_stage:
        vpp = args.num_layers // pp // args.num_layers_per_virtual_pipeline_stage
    found: dict[str, Any] = {
        "seq": args.seq_length,
        "tp": args.tensor_model_parallel_size,
        "cp": args.context_parallel_size,
        "pp": pp,
        "vpp": vpp,
        "ep": args.expert_model_parallel_size,
        "micro_batch": args.micro_batch_size,
        "recompute": "full" if args.recompute_granularity == "full" else "none",
        "gradients": "bf16" if args.grad_reduce_in_bf16 else "fp32",
        "distributed_optimizer": args.use_distributed_optimizer,
        "optimizer_offload": args.optimizer_offload_fraction * args.optimizer_cpu_offload,
        "fsdp": args.use_megatron_fsdp or args.use_torch_fsdp2,
        "path": "cpu" if args.transformer_impl == "local" else "gpu",
    }
    if args.hierarchical_context_parallel_sizes:
        found["intra"] = args.hierarchical_context_parallel_sizes[0]
    choices, said = flags.burst_config(args), lambda name: f"--burst-{name}"
    return found | choices_of(choices, args.seq_length, args.context_parallel_size, said)


def choices_of(
    choices: BurstConfig, seq: int, cp: int, said: Callable[[str], str]
) -> dict[str, Any]:
    """The fields of `Settings` that our own choices set. said: what a choice is called where the
    user wrote it."""
    rows = seq // max(1, cp)
    ours = choices.algorithm != "megatron"
    found: dict[str, Any] = {
        "store": choices.store or 0.0,
        "lm_head_loss": choices.lm_head_loss,
        "algorithm": choices.algorithm if ours and choices.algorithm != "auto" else "burst",
        "layout": choices.layout if choices.layout not in ("auto", "balanced") else "zigzag",
        "side": choices.side,
        "linear": choices.linear if ours or cp == 1 else "megatron",
        "wire": choices.wire_dtype or "fp32",
        "placement": choices.placement,
        "head_chunks": choices.head_chunks or 1,
        "ulysses": ulysses_size(choices, cp) if ours else 1,
    }
    if choices.intra_size:
        found["intra"] = choices.intra_size
    for name, counted in AUTO.items():
        value = getattr(choices, name)
        if value == "auto" and name in FEWEST_ROWS:
            counted = min(counted, max(1, rows // FEWEST_ROWS[name]))
        found[name] = counted if value == "auto" else value
    if not ours and found["sequence_chunks"] > 1:
        raise ValueError(
            f"{said('sequence-chunks')} {choices.sequence_chunks} is for BurstAttention: take "
            "--context-parallel-algo burst, or leave it out"
        )
    return found

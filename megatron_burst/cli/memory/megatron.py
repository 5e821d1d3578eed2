"""The model and the run that the flags of a Megatron command describe.

Only flags that memory depends on are read; all others pass, as in `doctor`. Our own flags have the
names and defaults of `flags`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from ... import flags
from ...advisor.models import Model, padded
from ...megatron.checks.config import ulysses_size
from ...recompute import tile_counts

NUMBERS: dict[str, int | None] = {
    "--num-layers": None, "--hidden-size": None, "--ffn-hidden-size": None,
    "--num-attention-heads": None, "--num-query-groups": None, "--kv-channels": None,
    "--seq-length": None, "--micro-batch-size": 1, "--global-batch-size": None,
    "--tensor-model-parallel-size": 1, "--pipeline-model-parallel-size": 1,
    "--context-parallel-size": 1, "--expert-model-parallel-size": 1,
    "--num-virtual-stages-per-pipeline-rank": None, "--num-layers-per-virtual-pipeline-stage": None,
    "--vocab-size": None, "--make-vocab-size-divisible-by": 128, "--num-experts": None,
    "--moe-router-topk": 2, "--moe-ffn-hidden-size": None,
    "--moe-shared-expert-intermediate-size": None,
}  # fmt: skip
SWITCHES = (
    "--swiglu", "--untie-embeddings-and-output-weights", "--group-query-attention",
    "--use-distributed-optimizer", "--optimizer-cpu-offload", "--grad-reduce-in-bf16",
    "--multi-latent-attention",
)  # fmt: skip
NEEDED = ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length")
# Counted so where left to the run, and pieces of no fewer rows than the run would take.
AUTO = {"offload": 1.0, "sequence_chunks": 32, "mlp_tiles": 64}
FEWEST_ROWS = {"sequence_chunks": tile_counts.FEWEST_ROWS, "mlp_tiles": tile_counts.LEAST}


def read(words: Sequence[str]) -> tuple[Model, dict[str, Any]]:
    """The model, and fields of `Settings`. ValueError naming the flag that is missing or wrong."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name, default in NUMBERS.items():
        parser.add_argument(name, type=int, default=default)
    for name in SWITCHES:
        parser.add_argument(name, action="store_true")
    parser.add_argument("--hierarchical-context-parallel-sizes", type=int, nargs="+")
    parser.add_argument("--recompute-granularity")
    parser.add_argument("--transformer-impl", default="transformer_engine")
    parser.add_argument("--optimizer-offload-fraction", type=float, default=1.0)
    flags.add_flags(parser, algorithm="burst")
    try:
        args, _ = parser.parse_known_args(list(words))
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from None
    for name in NEEDED:
        if getattr(args, _dest(name)) is None:
            raise ValueError(f"{name} is missing in the Megatron command; add it")
    if args.multi_latent_attention:
        raise ValueError("--multi-latent-attention is not counted yet; leave it out")
    flags.settle(args)
    return _model(args), _fields(args)


def _model(args: argparse.Namespace) -> Model:
    heads, hidden = args.num_attention_heads, args.hidden_size
    ffn = args.ffn_hidden_size or (
        int(4 * hidden * 2 / 3) // 64 * 64 if args.swiglu else 4 * hidden
    )
    experts = args.num_experts or 0
    model = Model(
        name="Megatron command",
        layers=args.num_layers,
        hidden=hidden,
        heads=heads,
        kv_heads=(args.num_query_groups or 1) if args.group_query_attention else heads,
        ffn=(args.moe_ffn_hidden_size or ffn) if experts else ffn,
        vocabulary=args.vocab_size or 128 * 1024,
        head_dim=args.kv_channels or hidden // heads,
        gated=args.swiglu,
        tied=not args.untie_embeddings_and_output_weights,
        experts=experts,
        top_k=args.moe_router_topk if experts else 0,
        shared=(args.moe_shared_expert_intermediate_size or 0) if experts else 0,
        moe_layers=args.num_layers if experts else 0,
        dense_ffn=ffn if experts else 0,
    )
    return padded(model, args.make_vocab_size_divisible_by * args.tensor_model_parallel_size)


def _fields(args: argparse.Namespace) -> dict[str, Any]:
    choices = flags.burst_config(args)
    pp, vpp = args.pipeline_model_parallel_size, args.num_virtual_stages_per_pipeline_rank or 1
    if args.num_layers_per_virtual_pipeline_stage:
        vpp = args.num_layers // pp // args.num_layers_per_virtual_pipeline_stage
    ours = choices.algorithm != "megatron"
    found: dict[str, Any] = {
        "seq": args.seq_length,
        "tp": args.tensor_model_parallel_size,
        "cp": args.context_parallel_size,
        "pp": pp,
        "vpp": vpp,
        "ep": args.expert_model_parallel_size,
        "micro_batch": args.micro_batch_size,
        "recompute": "full" if args.recompute_granularity == "full" else "none",
        "store": choices.store or 0.0,
        "lm_head_loss": choices.lm_head_loss,
        "gradients": "bf16" if args.grad_reduce_in_bf16 else "fp32",
        "distributed_optimizer": args.use_distributed_optimizer,
        "optimizer_offload": args.optimizer_offload_fraction * args.optimizer_cpu_offload,
        "algorithm": choices.algorithm if ours and choices.algorithm != "auto" else "burst",
        "layout": choices.layout if choices.layout != "balanced" else "zigzag",
        "side": choices.side,
        "wire": choices.wire_dtype or "fp32",
        "ulysses": ulysses_size(choices, args.context_parallel_size) if ours else 1,
        "placement": choices.placement,
        "head_chunks": choices.head_chunks or 1,
        "path": "cpu" if args.transformer_impl == "local" else "gpu",
    }
    sizes = args.hierarchical_context_parallel_sizes
    if sizes or choices.intra_size:
        found["intra"] = sizes[0] if sizes else choices.intra_size
    rows = args.seq_length // max(1, args.context_parallel_size)
    for name, counted in AUTO.items():
        value = getattr(choices, name)
        if value == "auto" and name in FEWEST_ROWS:
            counted = min(counted, max(1, rows // FEWEST_ROWS[name]))
        found[name] = counted if value == "auto" else value
    if not ours and found["sequence_chunks"] > 1:
        raise ValueError(
            f"--burst-sequence-chunks {choices.sequence_chunks} is for BurstAttention: take "
            "--context-parallel-algo burst, or leave it out"
        )
    return found


def _dest(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")

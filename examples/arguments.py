"""Command line of `pretrain_gpt.py`: Megatron's flags and the flags of this package.

It defines names and defaults of the Megatron flags that these examples use, and checks that need
only flags and the number of processes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path

from megatron_burst import flags


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line.

    Raises:
        ValueError: A flag is invalid; the message names the flag and a value that works.
    """
    parser = argparse.ArgumentParser(description="Train a Llama-style GPT on Megatron-Core.")
    flags.add_flags(parser, algorithm="burst")
    _add_parallel_flags(parser.add_argument_group("parallelism"))
    _add_model_flags(parser.add_argument_group("model"))
    _add_training_flags(parser.add_argument_group("training"))
    args = parser.parse_args(argv)
    check(args, world_size=int(os.environ.get("WORLD_SIZE", "1")))
    return args


def _add_parallel_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--context-parallel-size", type=int, default=1)
    add(
        "--hierarchical-context-parallel-sizes",
        type=int,
        nargs="+",
        metavar="N",
        help="ranks per node, then number of nodes, such as 2 2",
    )
    add("--tensor-model-parallel-size", type=int, default=1)
    add("--pipeline-model-parallel-size", type=int, default=1)
    add(
        "--num-virtual-stages-per-pipeline-rank",
        type=int,
        metavar="N",
        help="interleaved model chunks per pipeline rank",
    )
    add("--sequence-parallel", action="store_true")
    add("--use-distributed-optimizer", action="store_true")
    add("--transformer-impl", choices=["local", "transformer_engine"], default="local")
    add("--distributed-timeout-minutes", type=float, default=10)


def _add_model_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--num-layers", type=int, default=3)
    add("--hidden-size", type=int, default=192)
    add("--ffn-hidden-size", type=int, default=512)
    add("--num-attention-heads", type=int, default=6)
    add("--num-query-groups", type=int, help="key/value heads; default: number of query heads")
    add("--kv-channels", type=int, help="width of a head; default: hidden size / heads")
    add("--qk-layernorm", action="store_true")
    add("--untie-embeddings-and-output-weights", action="store_true")
    add("--rotary-base", type=int, default=10000)
    add("--init-method-std", type=float, default=0.02)
    add("--attention-dropout", type=float, default=0.0)
    add("--vocab-size", type=int, help="default: read from DATA_PATH.json")
    add("--make-vocab-size-divisible-by", type=int, default=64)
    add("--window-size", type=_pair, metavar="LEFT,RIGHT", help="sliding window; -1: no limit")
    add("--window-attn-skip-freq", type=int, help="every n-th layer has full attention")
    add("--softmax-type", choices=["vanilla", "off-by-one", "learnable"], default="vanilla")
    add("--mtp-num-layers", type=int, help="layers that predict tokens after the next one")
    add("--multi-latent-attention", action="store_true")
    add("--kv-lora-rank", type=int, default=32)
    add("--qk-head-dim", type=int, default=32)
    add("--qk-pos-emb-head-dim", type=int, default=16)
    add("--v-head-dim", type=int, default=32)
    add("--bf16", action="store_true")
    add("--recompute-granularity", choices=["full", "selective"])
    add("--recompute-method", choices=["uniform", "block"])
    add("--recompute-num-layers", type=int)
    add("--recompute-modules", nargs="+", default=["core_attn"])


def _add_training_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--data-path",
        required=True,
        metavar="PREFIX",
        help="path of a Megatron dataset without .bin or .idx",
    )
    add("--data-cache-path", help="folder of the sample indices; default: the folder of the data")
    add("--eod", type=int, default=256, help="token that ends a document")
    add(
        "--eod-mask-loss",
        action="store_true",
        help="exclude the token after a document's end from the loss",
    )
    add(
        "--packed",
        action="store_true",
        help="attention stays within each document of a sequence (packed batch, THD)",
    )
    add("--seq-length", type=int, default=4096)
    add("--micro-batch-size", type=int, default=1)
    add("--global-batch-size", type=int, help="default: one micro-batch per data-parallel rank")
    add("--train-iters", type=int, default=100)
    add(
        "--exit-interval",
        type=int,
        help="stop after this iteration; data order and learning rate do not change",
    )
    add("--lr", type=float, default=3e-3)
    add("--min-lr", type=float, default=3e-4)
    add("--lr-warmup-iters", type=int, default=5)
    add("--weight-decay", type=float, default=0.1)
    add("--adam-beta2", type=float, default=0.95)
    add("--clip-grad", type=float, default=1.0)
    add("--seed", type=int, default=1234)
    add("--save", metavar="DIR", help="write a checkpoint to DIR at the end of the run")
    add("--save-interval", type=int, help="also write a checkpoint after every N iterations")
    add("--load", metavar="DIR", help="resume from the latest checkpoint in DIR")
    add("--ckpt-step", type=int, help="iteration to resume from; default: the latest")
    add("--log-interval", type=int, default=1)
    add("--metrics", metavar="FILE", help="JSON lines, written by rank 0")


def check(args: argparse.Namespace, world_size: int) -> None:
    """Check the flags without Megatron, and set defaults that depend on other flags.

    Args:
        args: Parsed arguments; changed in place.
        world_size: Number of processes.

    Raises:
        ValueError: A flag is invalid; the message names the flag and a value that works.
    """
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    cp, sizes = args.context_parallel_size, args.hierarchical_context_parallel_sizes
    if world_size % (tp * pp * cp):
        raise ValueError(
            f"--tensor-model-parallel-size {tp} x --pipeline-model-parallel-size {pp} x "
            f"--context-parallel-size {cp} = {tp * pp * cp} does not divide the {world_size} "
            "processes of this run; change torchrun --nproc-per-node or one of the sizes"
        )
    if sizes is not None and math.prod(sizes) != cp:
        raise ValueError(
            f"--hierarchical-context-parallel-sizes {sizes} has the product "
            f"{math.prod(sizes)}, but --context-parallel-size is {cp}; the two must be equal"
        )
    if cp > 1 and args.seq_length % (2 * cp):
        raise ValueError(
            f"--seq-length {args.seq_length} is not divisible by 2 x --context-parallel-size "
            f"({2 * cp}); use {max(1, round(args.seq_length / (2 * cp))) * 2 * cp}"
        )
    if args.context_parallel_algo == "megatron" and cp > 1 and args.transformer_impl == "local":
        raise ValueError(
            f"--context-parallel-algo megatron with --context-parallel-size {cp} "
            "requires --transformer-impl transformer_engine; or use --context-parallel-algo burst"
        )
    if args.packed and args.micro_batch_size != 1:
        raise ValueError(
            f"--packed requires --micro-batch-size 1, got {args.micro_batch_size}; use 1 and a "
            "longer --seq-length"
        )
    if args.packed and args.window_size and cp == 1 and args.transformer_impl == "local":
        raise ValueError(
            "--packed with --window-size on one rank: Megatron's local attention ignores the "
            "documents in sliding-window layers; use --context-parallel-size 2 or more, or "
            "--transformer-impl transformer_engine"
        )
    flags.add_defaults(args)
    args.data_parallel_size = world_size // (tp * pp * cp)
    step = args.micro_batch_size * args.data_parallel_size
    args.global_batch_size = args.global_batch_size or step
    if args.global_batch_size % step:
        raise ValueError(
            f"--global-batch-size {args.global_batch_size} is not a multiple of "
            f"--micro-batch-size x data-parallel size ({step})"
        )
    _check_virtual_stages(args, args.global_batch_size // step)
    args.num_query_groups = args.num_query_groups or args.num_attention_heads
    args.vocab_size = args.vocab_size or _vocab_size(args.data_path)
    args.lr_warmup_iters = min(args.lr_warmup_iters, args.train_iters - 1)
    args.exit_interval = min(args.exit_interval or args.train_iters, args.train_iters)


def _check_virtual_stages(args: argparse.Namespace, micro_batches: int) -> None:
    virtual, pp = args.num_virtual_stages_per_pipeline_rank, args.pipeline_model_parallel_size
    if virtual is None:
        return
    flag = f"--num-virtual-stages-per-pipeline-rank {virtual}"
    if virtual < 2 or pp < 2:
        raise ValueError(
            f"{flag} with --pipeline-model-parallel-size {pp}: an interleaved pipeline requires at "
            "least 2 of both; remove the flag"
        )
    if args.num_layers % (virtual * pp):
        raise ValueError(
            f"{flag} x --pipeline-model-parallel-size {pp} does not divide --num-layers "
            f"{args.num_layers}"
        )
    if micro_batches % pp:
        raise ValueError(
            f"{flag}: {micro_batches} micro-batches per step are not a multiple of "
            f"--pipeline-model-parallel-size {pp}; change --global-batch-size"
        )


def _pair(text: str) -> tuple[int, int]:
    left, right = text.split(",")
    return int(left), int(right)


def _vocab_size(prefix: str) -> int:
    sidecar = Path(f"{prefix}.json")
    if not sidecar.exists():
        raise ValueError(f"--vocab-size is required, because {sidecar} does not exist")
    return int(json.loads(sidecar.read_text())["vocab_size"])

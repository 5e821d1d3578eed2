# SPDX-License-Identifier: Apache-2.0
"""`megatron-burst advise`: find the settings with the shortest step, and predict time and memory.

    megatron-burst advise --model llama3-8b --gpus 64 --gpu h100 --seq 1M
    megatron-burst advise --model qwen3-30b-a3b --cluster cluster.toml --seq 128K --top 3
    megatron-burst advise --gpus 64 --gpu h100 -- pretrain_gpt.py --num-layers 32 ...

The prediction is computed from communication schedules, sizes of tensors, and rates of links and
kernels. `tools.advise.search.search` describes the search. Exit status: 0 if settings are found, 1
if no settings fit into memory, 2 for invalid input.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ....autotune import cluster_file, clusters
from ....cli.console import progress
from .. import model_arguments
from ..call_flags import named
from . import advice, flags, report
from .shapes.model import Model

EPILOG = """\
K and M are 1,024 and 1,048,576 tokens. Settings that are not given are searched;
--tp 8 --store 1 fixes two of them. The model can also be read from a Megatron
command after --, whose parallel sizes and other run settings are ignored:
  megatron-burst advise --gpus 64 --gpu h100 -- \\
      pretrain_gpt.py --num-layers 32 --seq-length 131072 ...

exit status: 0 advice, 1 nothing fits, 2 bad input
"""
# Fields of `Settings` without a flag of `advise`.
NOT_FIXED = "micro_batches", "optimizer_bytes", "fsdp", "path"
FIXED = [name for name in flags.FIELDS if name not in NOT_FIXED]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `advise` to a parser."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    flags.add_run(parser)
    add = parser.add_argument
    add("--longest", action="store_true", help="the longest sequence that fits, instead of --seq")
    add(
        "--tokens-per-step",
        metavar="N",
        help="tokens per step over all ranks (4M, or one sequence if longer)",
    )
    flags.add_packed(parser)
    add(
        "--kernel",
        metavar="NAME",
        help="attention kernel of the run, if not the fastest for --gpu: aten (FlashAttention-2), "
        "aten_cudnn or flash3, at its published rate",
    )
    add("--cluster", type=Path, metavar="FILE", help="cluster file of `megatron-burst calibrate`")
    flags.add_fields(parser, FIXED)
    add("--top", type=int, default=10, metavar="N", help="number of configurations to show (10)")
    add("--sbatch", action="store_true", help="print only a script for Slurm's sbatch")
    add(*named("--train-iters"), type=int, metavar="N",
        help="steps of the whole run, from which --sbatch derives the time limit")  # fmt: skip
    add(
        "megatron",
        nargs=argparse.REMAINDER,
        metavar="[--] COMMAND",
        help="a Megatron command that describes the model",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the advice and return the exit status: 0, or 1 if no settings fit."""
    if arguments.sbatch and arguments.json:
        raise ValueError("--sbatch and --json print different output; use only one of them")
    if arguments.train_iters is not None and not arguments.sbatch:
        raise ValueError("--train-iters requires --sbatch; add --sbatch, or remove --train-iters")
    if arguments.sbatch and arguments.megatron:
        raise ValueError(
            "--sbatch and a Megatron command exclude each other; describe the model with --model"
        )
    model, seq = _model(arguments)
    try:
        with progress("searching parallel configurations") as report_progress:
            result = advice.advise(
                model, _cluster(arguments), seq=seq, tokens_per_step=arguments.tokens_per_step,
                packed=arguments.packed, top=arguments.top, progress=report_progress,
                **flags.given_fields(arguments, FIXED),
            )  # fmt: skip
    except advice.DoesNotFit as error:
        print(f"megatron-burst advise: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(report.facts(result, arguments.megatron), indent=1))
    elif arguments.sbatch:
        print(result.job(0, arguments.train_iters), end="")
    else:
        report.show(result, arguments.megatron)
    return 0


def _model(arguments: argparse.Namespace) -> tuple[Model, str | int]:
    """Return the model and the sequence length, which is the argument `seq` of `mb.advise`."""
    model, described = model_arguments.find(arguments.model, arguments.megatron)
    if arguments.longest and arguments.seq is not None:
        raise ValueError("--longest and --seq both set the sequence length; use only one of them")
    seq = advice.LONGEST if arguments.longest else arguments.seq or described.get("seq")
    if seq is None:
        raise ValueError("--seq is required, for example --seq 1M; or use --longest")
    return model, seq


def _cluster(arguments: argparse.Namespace) -> clusters.Cluster:
    """Return the cluster of `--cluster` or `--gpu`; flags such as `--per-node` override it."""
    if arguments.cluster is None:
        if arguments.gpus is None:
            raise ValueError(
                "--gpus is required: the number of GPUs, for example --gpus 64; or use --cluster "
                "FILE"
            )
        return flags.cluster_of(arguments, kernel=arguments.kernel)
    if arguments.gpu is not None:
        raise ValueError("--gpu and --cluster both set the GPUs; use only one of them")
    return flags.cluster_of(arguments, cluster_file.read(arguments.cluster), arguments.kernel)

"""`megatron-burst advise`: which flags, how fast, how much memory, before a cluster is booked.

    megatron-burst advise --model llama3-8b --gpus 64 --gpu h100 --seq 1M
    megatron-burst advise --model qwen3-30b-a3b --cluster cluster.toml --seq 128K --top 3 --recipe
    megatron-burst advise --gpus 64 --gpu h100 -- pretrain_gpt.py --num-layers 32 ...

A forecast from the schedules that run, the sizes of tensors and rates of links and kernels;
`advisor.search.search` says what is tried. Exit status: 0 advice, 1 nothing fits, 2 bad input.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from ...advisor import advice, clusters, settings
from ...advisor.search.packed import NAMED
from ...advisor.shapes.model import Model
from ...schedule.topology import PLACEMENTS
from ...units import size_of
from .. import model_arguments
from . import progress, report

EPILOG = """\
K and M after a number of tokens are 1,024 and 1,048,576. What is not fixed is searched: --tp 8
--store 1 fixes two settings. The model of a Megatron command is read after --; its other flags do
not count, as they are what is looked for:
  megatron-burst advise --gpus 64 --gpu h100 -- pretrain_gpt.py --num-layers 32 --seq-length ...

exit status: 0 advice, 1 nothing fits, 2 bad input
"""
# Fields of `Settings` that a flag of the same name fixes: type or choices, and help.
FIXED: dict[str, tuple[Any, str]] = {
    "tp": (int, "tensor-parallel ranks, with sequence parallelism"),
    "cp": (int, "context-parallel ranks"),
    "pp": (int, "pipeline stages"),
    "vpp": (int, "virtual stages of each"),
    "ep": (int, "expert-parallel ranks"),
    "dp": (int, "data-parallel ranks besides context parallelism"),
    "micro_batch": (int, "sequences of a micro-batch"),
    "recompute": (get_args(settings.Recompute), "of layers"),
    "store": (float, "fraction of attention results that recompute keeps"),
    "offload": (float, "fraction of layer inputs and store that waits on the host"),
    "sequence_chunks": (int, "chunks of rows of the attention half"),
    "mlp_tiles": (int, "tiles of rows of the MLP half"),
    "optimizer_offload": (float, "fraction of optimizer states on the host"),
    "lm_head_loss": (get_args(settings.Loss), "the LM head and its loss as one operation"),
    "gradients": (get_args(settings.Dtype), "dtype in which gradients are summed"),
    "wire": (get_args(settings.Dtype), "dtype in which gradients of keys or queries travel"),
    "algorithm": (str, "of attention: ring, burst, hybrid, tile, ..."),
    "side": (str, "what travels in backward: kv or query"),
    "linear": (get_args(settings.Linear), "what carries states of linear attention over ranks"),
    "layout": (str, "which rows each rank holds: zigzag or striped"),
    "ulysses": (int, "ranks that share heads"),
    "head_chunks": (int, "groups of heads, of which one travels while another computes"),
    "placement": (PLACEMENTS, "of ranks that share heads"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `advise`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add = parser.add_argument
    add("--model", metavar="NAME", help=model_arguments.HELP)
    add("--seq", metavar="N", help="tokens of a sequence, such as 131072, 128K or 1M")
    add("--tokens-per-step", metavar="N", help="over all ranks (4M, or one sequence if longer)")
    lengths = f"8K,32K,128K, a file of lengths, or {', '.join(NAMED)}"
    add("--packed", metavar="LENGTHS", help=f"documents in packs of --seq tokens: {lengths}")
    add("--cluster", type=Path, metavar="FILE", help="what `megatron-burst calibrate` measured")
    add("--gpus", type=int, metavar="N", help="of all nodes")
    add("--per-node", type=int, metavar="N", help="GPUs of a node (8)")
    add("--gpu", metavar="NAME", help=f"one of {', '.join(clusters.GPUS)} (h100)")
    add("--gpu-memory", metavar="SIZE", help="of another GPU, such as 96GiB")
    add("--host-memory", metavar="SIZE", help="of a node, to be taken (1.6TB)")
    for name, (kind, words) in FIXED.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(kind, tuple):
            add(flag, choices=kind, help=words)
        else:
            add(flag, type=kind, metavar="NAME" if kind is str else "N", help=words)
    add("--top", type=int, default=10, metavar="N", help="how many configurations to show (10)")
    add("--recipe", action="store_true", help="print the script for Megatron-Bridge only")
    add("--json", action="store_true", help="print JSON, for scripts")
    add("--png", type=Path, metavar="FILE", help="draw one layer and one step over time")
    add("megatron", nargs=argparse.REMAINDER, metavar="[--] COMMAND", help="a Megatron command")


def run(arguments: argparse.Namespace) -> int:
    """Print the advice. Returns the exit status."""
    if arguments.recipe and arguments.json:
        raise ValueError("--recipe and --json print different things: give one of them")
    if arguments.png and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--png needs matplotlib: pip install 'megatron-burst[show]'")
    model, seq = _model(arguments)
    fixed = {name: getattr(arguments, name) for name in FIXED}
    try:
        with progress.shown() as tell:
            found = advice.advise(
                model, _cluster(arguments), seq=seq, tokens_per_step=arguments.tokens_per_step,
                packed=arguments.packed, top=arguments.top, progress=tell,
                **{name: value for name, value in fixed.items() if value is not None},
            )  # fmt: skip
    except advice.DoesNotFit as error:
        print(f"megatron-burst advise: {error}", file=sys.stderr)
        return 1
    if arguments.png is not None:
        from . import picture

        picture.draw(found, arguments.png)
    if arguments.json:
        print(json.dumps(report.facts(found, arguments.megatron), indent=1))
    elif arguments.recipe:
        print(found.recipe(), end="")
    else:
        report.show(found, arguments.megatron)
    return 0


def _model(arguments: argparse.Namespace) -> tuple[Model, str | int]:
    """The model, and the tokens of a sequence."""
    model, given = model_arguments.find(arguments.model, arguments.megatron)
    seq = arguments.seq or given.get("seq")
    if seq is None:
        raise ValueError("--seq is needed, such as --seq 1M")
    return model, seq


def _cluster(arguments: argparse.Namespace) -> clusters.Cluster:
    """From a file, or from the name of a GPU; flags change what they name."""
    if arguments.cluster is not None:
        if arguments.gpu is not None:
            raise ValueError("--gpu and --cluster both say which GPUs there are: give one of them")
        cluster = advice.cluster_of(arguments.cluster, None, 0)
        named = {"gpus": arguments.gpus, "per_node": arguments.per_node}
        cluster = replace(cluster, **{k: v for k, v in named.items() if v is not None})
    else:
        if arguments.gpus is None:
            raise ValueError("--gpus is needed, such as --gpus 64, or --cluster FILE")
        per_node = 8 if arguments.per_node is None else arguments.per_node
        cluster = clusters.Cluster(clusters.gpu(arguments.gpu or "h100"), arguments.gpus, per_node)
    if arguments.gpu_memory:
        memory = size_of(arguments.gpu_memory, "--gpu-memory")
        cluster = replace(cluster, gpu=replace(cluster.gpu, name="GPU", memory=memory))
    if arguments.host_memory:
        memory = size_of(arguments.host_memory, "--host-memory")
        cluster = replace(cluster, host_memory=memory)
    return cluster

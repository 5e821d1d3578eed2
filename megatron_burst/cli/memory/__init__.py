"""`megatron-burst memory`: what one rank of a run holds, by item, over one training step.

    megatron-burst memory --model llama3-8b --gpus 8 --gpu h100 --seq 1M
    megatron-burst memory --model llama3-8b --gpus 8 --gpu h100 --longest --offload 1
    megatron-burst memory --gpus 64 --gpu h100 -- pretrain_gpt.py --num-layers 32 ...
    megatron-burst memory --model llama3_8b_pretrain_8gpu_h100_256k --gpus 8    (a recipe)

An account from the sizes of tensors, not a measurement; `advisor.account.memory` says what is
counted.
Exit status: 0 it fits, 1 it does not, 2 bad input.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from ...advisor import clusters, settings
from ...advisor.account.longest import Longest, best, layouts_of
from ...advisor.account.memory import Account, account, fit
from ...advisor.forecast.step_time import StepTime, step_time
from ...advisor.shapes import models
from ...schedule.topology import Placement
from ...units import size_of
from .. import model_arguments
from . import report

EPILOG = """\
K and M after a number of tokens are 1,024 and 1,048,576. Without --tp the size is chosen that takes
least memory; ranks that are left are context-parallel. A Megatron command is read after --:
  megatron-burst memory --gpus 64 --gpu h100 -- pretrain_gpt.py --num-layers 32 --seq-length ...

exit status: 0 it fits, 1 it does not, 2 bad input
"""
# Flag, type and help of what goes into `Settings` under its own name.
NUMBERS: dict[str, tuple[type, str]] = {
    "tp": (int, "tensor-parallel ranks, with sequence parallelism"),
    "cp": (int, "context-parallel ranks; default: what --gpus leaves"),
    "pp": (int, "pipeline stages"),
    "vpp": (int, "virtual stages of each"),
    "ep": (int, "expert-parallel ranks"),
    "dp": (int, "data-parallel ranks besides context parallelism"),
    "micro_batch": (int, "sequences of a micro-batch"),
    "micro_batches": (int, "micro-batches of a step on each rank"),
    "store": (float, "fraction of attention results that recompute keeps"),
    "offload": (float, "fraction of layer inputs and store that waits on the host"),
    "sequence_chunks": (int, "chunks of rows of the attention half"),
    "mlp_tiles": (int, "tiles of rows of the MLP half"),
    "ulysses": (int, "context-parallel ranks that share heads by all-to-all"),
    "head_chunks": (int, "chunks of the heads whose rings run one behind the other"),
    "optimizer_offload": (float, "fraction of optimizer states on the host"),
    "optimizer_bytes": (int, "bytes of fp32 weights and moments per parameter"),
}
CHOICES: dict[str, tuple[Any, str]] = {
    "recompute": (settings.Recompute, "of layers"),
    "lm_head_loss": (settings.Loss, "the LM head and its loss as one operation, or apart"),
    "gradients": (settings.Dtype, "dtype in which gradients are summed"),
    "wire": (settings.Dtype, "dtype in which gradients of keys or queries travel"),
    "linear": (settings.Linear, "what carries states of linear attention over ranks"),
    "placement": (Placement, "what lies next to each other: ranks that share heads, or a ring's"),
    "path": (settings.Path, "whose modules compute: Transformer Engine's, or Megatron's on a CPU"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `memory`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add = parser.add_argument
    add("--model", metavar="NAME", help=model_arguments.HELP)
    add("--seq", metavar="N", help="tokens of a sequence, such as 131072, 128K or 5M")
    add("--gpus", type=int, required=True, metavar="N", help="of all nodes")
    add("--per-node", type=int, default=8, metavar="N", help="GPUs of a node (8)")
    add("--gpu", default="h100", metavar="NAME", help=f"one of {', '.join(clusters.GPUS)} (h100)")
    add("--gpu-memory", metavar="SIZE", help="of another GPU, such as 96GiB")
    add("--host-memory", default="1.6TB", metavar="SIZE", help="of a node, to be taken (1.6TB)")
    add("--reserve", default="4GiB", metavar="SIZE", help="of a GPU, not for tensors (4GiB)")
    for name, (kind, words) in NUMBERS.items():
        add(_flag(name), type=kind, metavar="N", help=words)
    for name, (names, words) in CHOICES.items():
        add(_flag(name), choices=get_args(names), help=words)
    for name in ("algorithm", "layout", "side"):
        add(_flag(name), metavar="NAME", help=f"of attention ({getattr(DEFAULT, name)})")
    add("--no-distributed-optimizer", action="store_true", help="states on every rank")
    add("--fsdp", action="store_true", help="parameters and gradients are sharded too")
    add("--longest", action="store_true", help="the longest sequence that fits")
    add("--json", action="store_true", help="print JSON, for scripts")
    add("--png", type=Path, metavar="FILE", help="draw the memory over one step")
    add("megatron", nargs=argparse.REMAINDER, metavar="[--] COMMAND", help="a Megatron command")


DEFAULT = settings.Settings(seq=1)


def run(arguments: argparse.Namespace) -> int:
    """Print the account. Returns the exit status."""
    if arguments.longest and arguments.seq is not None:
        raise ValueError("--longest looks for --seq: give one of them")
    cluster, model, base, chosen = _read(arguments)
    runs = [base] if chosen else list(layouts_of(model, cluster, base))
    if not runs:
        raise ValueError(
            f"--gpus {cluster.gpus}: no --tp that divides {model.kv_heads} key/value heads and "
            f"--pp {base.pp} fits; give --tp and --cp"
        )
    if arguments.longest:
        found = best(model, cluster, runs)
        shown = account(model, found.run)
    else:
        accounts = [account(model, replace(one, seq=base.seq)) for one in runs]
        shown, found = min(accounts, key=lambda one: one.peak.bytes), None
    left = fit(shown, cluster)
    time = _time(model, cluster, shown.run)
    if arguments.png is not None:
        from . import picture

        picture.draw(shown, cluster, arguments.png)
    if arguments.json:
        print(json.dumps(report.facts(shown, cluster, left, time, _binds(found)), indent=1))
    else:
        report.show(shown, cluster, left, time, _binds(found))
    return 0 if left.fits else 1


def _time(model: models.Model, cluster: clusters.Cluster, run: settings.Settings) -> StepTime | str:
    """Of a step; or why none is predicted, as rings must have equally many ranks on each node."""
    try:
        return step_time(model, cluster, run)
    except ValueError as error:
        return str(error)


def _binds(found: Longest | None) -> str | None:
    return None if found is None else found.binds


def _read(
    arguments: argparse.Namespace,
) -> tuple[clusters.Cluster, models.Model, settings.Settings, bool]:
    """The cluster, the model, the run, and whether its groups are given."""
    model, given = model_arguments.find(arguments.model, arguments.megatron)
    names = (*NUMBERS, *CHOICES, "algorithm", "layout", "side")
    own = {n: getattr(arguments, n) for n in names if getattr(arguments, n) is not None}
    given |= own
    if arguments.no_distributed_optimizer:
        given["distributed_optimizer"] = False
    if arguments.fsdp:
        given["fsdp"] = True
    if arguments.seq is not None:
        given["seq"] = tokens(arguments.seq)
    if "seq" not in given and not arguments.longest:
        raise ValueError("--seq is needed, such as --seq 1M, or --longest")
    cluster = _cluster(arguments)
    base = settings.Settings(**{"seq": 1, **given})
    base = replace(base, intra=max(1, cluster.ranks_per_node // base.tp))
    return cluster, model, *_groups(base, given, cluster)


def _groups(
    base: settings.Settings, given: dict[str, Any], cluster: clusters.Cluster
) -> tuple[settings.Settings, bool]:
    """The run with all GPUs in its groups; False where the tensor-parallel size is left open."""
    if "tp" not in given and "cp" not in given:
        return base, False
    others = base.tp * base.pp * (base.cp if "cp" in given else base.dp)
    if cluster.gpus % others:
        raise ValueError(
            f"--gpus {cluster.gpus} is no multiple of the {others} ranks of --tp {base.tp} x --pp "
            f"{base.pp} x {'--cp ' + str(base.cp) if 'cp' in given else '--dp ' + str(base.dp)}"
        )
    rest = cluster.gpus // others
    if "cp" in given and "dp" in given and rest != base.dp:
        raise ValueError(
            f"--gpus {cluster.gpus} are not --tp x --pp x --cp x --dp, {others * base.dp}: leave "
            "--dp out"
        )
    return replace(base, **({"dp": rest} if "cp" in given else {"cp": rest})), True


def _cluster(arguments: argparse.Namespace) -> clusters.Cluster:
    gpu = clusters.gpu(arguments.gpu)
    if arguments.gpu_memory:
        gpu = replace(gpu, name="GPU", memory=size_of(arguments.gpu_memory, "--gpu-memory"))
    return clusters.Cluster(
        gpu,
        arguments.gpus,
        arguments.per_node,
        host_memory=size_of(arguments.host_memory, "--host-memory"),
        reserve=size_of(arguments.reserve, "--reserve"),
    )


def tokens(text: str) -> int:
    """131072, 128K or 5M. ValueError for anything else."""
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    try:
        count = float(number) * {"": 1, "K": 2**10, "M": 2**20}[unit]
    except (KeyError, ValueError):
        raise ValueError(f"--seq {text}: a number of tokens such as 131072, 128K or 5M") from None
    if count < 1 or count != int(count):
        raise ValueError(f"--seq {text}: no whole number of tokens; 131072, 128K or 5M would do")
    return int(count)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


__all__ = ["Account", "add_arguments", "run", "tokens"]

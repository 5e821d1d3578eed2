"""`megatron-burst advise`: which flags, how fast, how much memory, before a cluster is booked.

    megatron-burst advise --model llama3-8b --gpus 64 --gpu h100 --seq 1M
    megatron-burst advise --model qwen3-30b-a3b --cluster cluster.toml --seq 128K --top 3 --recipe
    megatron-burst advise --gpus 64 --gpu h100 -- pretrain_gpt.py --num-layers 32 ...

A forecast from the schedules that run, the sizes of tensors and rates of links and kernels;
`tools.advise.search.search` says what is tried. Exit status: 0 advice, 1 nothing fits, 2 bad input.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ...autotune import clusters
from .. import model_arguments
from ..call_flags import check_place
from . import advice, flags, report
from .search.packed import NAMED
from .shapes.model import Model


@contextmanager
def progress_shown() -> Iterator[Callable[[int, int], None]]:
    """A bar while the context lasts; gone when it ends, and none where there is no terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("searching parallel configurations"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("search", total=None)

        def tell(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield tell


EPILOG = """\
K and M after a number of tokens are 1,024 and 1,048,576. What is not fixed is searched: --tp 8
--store 1 fixes two settings. The model of a Megatron command is read after --; its other flags do
not count, as they are what is looked for:
  megatron-burst advise --gpus 64 --gpu h100 -- pretrain_gpt.py --num-layers 32 --seq-length ...

exit status: 0 advice, 1 nothing fits, 2 bad input
"""
# Fields of `Settings` that a flag of the same name fixes.
FIXED = [name for name in flags.FIELDS
         if name not in ("micro_batches", "optimizer_bytes", "fsdp", "path")]  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `advise`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    flags.add_run(parser)
    add = parser.add_argument
    add("--tokens-per-step", metavar="N", help="over all ranks (4M, or one sequence if longer)")
    lengths = f"8K,32K,128K, a file of lengths, or {', '.join(NAMED)}"
    add("--packed", metavar="LENGTHS", help=f"documents in packs of --seq tokens: {lengths}")
    add("--cluster", type=Path, metavar="FILE", help="what `megatron-burst calibrate` measured")
    flags.add_fields(parser, FIXED)
    add("--top", type=int, default=10, metavar="N", help="how many configurations to show (10)")
    add("--recipe", action="store_true", help="print the script for Megatron-Bridge only")
    add("--png", type=Path, metavar="FILE", help="draw one layer and one step over time")
    add("megatron", nargs=argparse.REMAINDER, metavar="[--] COMMAND", help="a Megatron command")


def run(arguments: argparse.Namespace) -> int:
    """Print the advice. Returns the exit status."""
    if arguments.recipe and arguments.json:
        raise ValueError("--recipe and --json print different things: give one of them")
    check_place(arguments.png, "--png")
    model, seq = _model(arguments)
    try:
        with progress_shown() as tell:
            found = advice.advise(
                model, _cluster(arguments), seq=seq, tokens_per_step=arguments.tokens_per_step,
                packed=arguments.packed, top=arguments.top, progress=tell,
                **flags.given_fields(arguments, FIXED),
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
    if arguments.cluster is None:
        if arguments.gpus is None:
            raise ValueError("--gpus is needed, such as --gpus 64, or --cluster FILE")
        return flags.cluster_of(arguments)
    if arguments.gpu is not None:
        raise ValueError("--gpu and --cluster both say which GPUs there are: give one of them")
    return flags.cluster_of(arguments, advice.cluster_of(arguments.cluster, None, 0))

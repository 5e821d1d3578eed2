"""`megatron-burst doctor`: what is installed, what it would choose, what would go wrong.

    megatron-burst doctor
    megatron-burst doctor -- pretrain_gpt.py --context-parallel-size 16 ...    # your command
    torchrun --nproc-per-node 8 -m megatron_burst doctor --distributed

Owns the flags and the order of the questions; each question is a module's. Changes nothing.
First what is read, in the time that torch needs to be imported, and shown at once; then what is
tried: kernels, compiled operators, and the hooks, which import Megatron-Core.
Exit status: 0 no problem, 1 problems, 2 bad input.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from . import installed, library, machine, report, rings
from .command import Command, hazards
from .finding import Finding, note, ok, status
from .refused import refusals
from .sizes import hierarchical_sizes

NODE = 8  # GPUs of a node, where neither a flag nor this machine says it
EPILOG = """\
What follows -- (or a script's name) is your Megatron command, searched for what would go wrong:
  megatron-burst doctor -- pretrain_gpt.py --context-parallel-size 16 --seq-length 131072 ...
Under torchrun, on the GPUs of the run or on any CPUs, --distributed checks the real groups:
  torchrun --nproc-per-node 8 -m megatron_burst doctor --distributed

exit status: 0 no problem, 1 problems, 2 bad input
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `doctor`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("--tensor-model-parallel-size", type=int, metavar="N")
    parser.add_argument(
        "--context-parallel-size",
        type=int,
        metavar="N",
        help="with --distributed: all that tensor parallelism leaves",
    )
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="default: of this machine")
    parser.add_argument(
        "--distributed", action="store_true", help="under torchrun: check and time the real groups"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="try nothing: leave out kernels, compiled operators and Megatron's hooks",
    )
    parser.add_argument("--json", action="store_true", help="for scripts")
    parser.add_argument(
        "megatron",
        nargs=argparse.REMAINDER,
        metavar="[--] COMMAND",
        help="your Megatron command, with all that belongs to it",
    )


def run(arguments: argparse.Namespace) -> int:
    """Ask all questions and show the answers; the exit status."""
    if arguments.megatron[:1] == ["--"]:
        del arguments.megatron[0]
    command = Command(arguments.megatron)
    for name in ("tensor_model_parallel_size", "context_parallel_size"):
        flag = "--" + name.replace("_", "-")
        value = getattr(arguments, name)
        if value is not None:
            command.given.setdefault(flag, [str(value)])
    if arguments.distributed:
        return rings.run(command, arguments.gpus_per_node, arguments.json)
    here = machine.describe()
    read = list(_read(arguments, command, here))  # bad input is told before anything else
    shown = report.Report(arguments.json)
    shown.add(read)
    if not arguments.quick:
        shown.add(_tried(), "trying kernels and Megatron's hooks")
    shown.end({"machine": here})
    return status(shown.findings)


def _tried() -> Iterator[Finding]:
    yield from installed.kernels()
    yield from library.library()
    yield from installed.hooks()


def _read(
    arguments: argparse.Namespace, command: Command, here: dict[str, Any]
) -> Iterator[Finding]:
    yield from installed.versions()
    gpus, nics = here["gpus"], here["nics"]
    yield ok("GPUs", "; ".join(gpus)) if gpus else note("GPUs", "none")
    shown = ", ".join(f"{name} ({speed})" for name, speed in nics.items())
    yield ok("NICs", shown) if nics else note("NICs", "none with hardware that this system shows")
    per_node = arguments.gpus_per_node
    per_node = len(gpus) or NODE if per_node is None else per_node
    sizes = hierarchical_sizes(command.tp, command.cp, per_node)
    if command.cp > 1:
        flags = sizes.flags or "no --hierarchical-context-parallel-sizes"
        given = f"TP {command.tp}, CP {command.cp}, {per_node} GPUs per node"
        yield ok("sizes", f"for {given}: {flags} ({sizes.reason})")
    if arguments.megatron:
        te = installed.version(*installed.PACKAGES["Transformer Engine"])
        yield from hazards(command, per_node, here, te)
        yield from refusals(command, te)

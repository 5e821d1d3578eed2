# SPDX-License-Identifier: Apache-2.0
"""`megatron-burst doctor`: check the installation, this machine, and a Megatron command.

    megatron-burst doctor
    megatron-burst doctor -- pretrain_gpt.py --context-parallel-size 16 ...    # your command
    torchrun --nproc-per-node 8 -m megatron_burst doctor --distributed
    megatron-burst doctor --gpu-report report.md

Quick checks (`--quick`) only read versions, hardware and the command. The other checks run kernels
and compiled operators. They also import Megatron-Core, patch it in this process and undo the
patches. No check changes installed files. Exit status: 0 no problem, 1 problems, 2 bad input.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from ... import registry
from ..megatron_arguments import MegatronCommand, parse
from .report import Finding, Report, note, ok, status
from .sizes import hierarchical_sizes

NODE = 8  # GPUs per node, if there is neither a flag nor a GPU
EPILOG = """\
The doctor also checks a Megatron command, given after -- or after the name of its script:
  megatron-burst doctor -- pretrain_gpt.py --context-parallel-size 16 --seq-length 131072 ...
Under torchrun, on GPUs or on CPUs, --distributed checks the process groups themselves:
  torchrun --nproc-per-node 8 -m megatron_burst doctor --distributed
With a GPU, --gpu-report writes a file for a bug report: kernels against float64, times, versions,
and under torchrun how much communication overlaps with attention:
  torchrun --nproc-per-node 8 -m megatron_burst doctor --gpu-report report.md

exit status: 0 no problem, 1 problems, 2 bad input
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `doctor`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add = parser.add_argument
    add("--tensor-model-parallel-size", "--tp", type=int, metavar="N",
        help="default: the value in COMMAND, or 1")  # fmt: skip
    add("--context-parallel-size", "--cp", type=int, metavar="N",
        help="default: the value in COMMAND, or 1; with --distributed all other processes",
    )  # fmt: skip
    add(
        "--gpus-per-node", "--per-node", type=int, metavar="N", help="default: GPUs of this machine"
    )
    add("--distributed", action="store_true",
        help="under torchrun: check and time the process groups")  # fmt: skip
    add("--quick", action="store_true",
        help="skip the trials of kernels, compiled operators and Megatron's hooks")  # fmt: skip
    add("--json", action="store_true", help="print JSON, for scripts")
    add("--gpu-report", type=Path, metavar="FILE",
        help="test this GPU and write a report for the maintainers")  # fmt: skip
    add("--device", choices=["cuda", "cpu"],
        help="device of --gpu-report; cpu is a dry run (default: cuda)")  # fmt: skip
    add("megatron", nargs=argparse.REMAINDER, metavar="[--] COMMAND",
        help="your Megatron command, with all its flags")  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Run all checks, print the findings and return the exit status."""
    if arguments.megatron[:1] == ["--"]:
        del arguments.megatron[0]
    if arguments.gpu_report is not None or arguments.device is not None:
        return _gpu(arguments)
    own = {
        "--tensor-model-parallel-size": arguments.tensor_model_parallel_size,
        "--context-parallel-size": arguments.context_parallel_size,
    }
    words = [f"{flag}={size}" for flag, size in own.items() if size is not None]
    command = parse([*words, *arguments.megatron])  # flags of COMMAND come last and win
    per_node = arguments.gpus_per_node
    # Refuse impossible sizes before the import of torch, which takes seconds.
    hierarchical_sizes(command.tp, command.cp, command.tp if per_node is None else per_node)
    from . import machine, rings

    if arguments.distributed:
        return rings.run(command, per_node, arguments.json)
    here = machine.describe()
    read = list(_read(arguments, command, here))  # bad input ends the command before output
    shown = Report(arguments.json)
    shown.add(read)
    if not arguments.quick:
        from . import installed, kernels, library

        tried = chain(kernels.kernels(), library.library(), installed.hooks())
        shown.add(tried, "trying kernels and Megatron's hooks")
    shown.end({"machine": here})
    return status(shown.findings)


def _gpu(arguments: argparse.Namespace) -> int:
    """Run `--gpu-report`.

    A Megatron COMMAND is refused, because the report is for others and paths may be private.
    """
    if arguments.gpu_report is None:
        raise ValueError("--device requires --gpu-report FILE; add it, or leave --device out")
    excluded = {
        "--distributed": arguments.distributed,
        "--json": arguments.json,
        "COMMAND": arguments.megatron,
    }
    if any(excluded.values()):
        names = ", ".join(name for name, is_set in excluded.items() if is_set)
        raise ValueError(f"--gpu-report excludes {names}; run the doctor twice")
    report = registry.required("gpu_report", "--gpu-report")
    return report.run(arguments.gpu_report, arguments.device or "cuda", arguments.quick)


def _read(
    arguments: argparse.Namespace, command: MegatronCommand, here: dict[str, Any]
) -> Iterator[Finding]:
    from . import installed
    from .hazards import hazards, refusals

    yield from installed.versions(bool(arguments.megatron))
    gpus, nics = here["gpus"], here["nics"]
    yield ok("GPUs", "; ".join(gpus)) if gpus else note("GPUs", "none")
    shown = ", ".join(f"{name} ({speed})" for name, speed in nics.items())
    yield ok("NICs", shown) if nics else note("NICs", "no network hardware found")
    per_node = arguments.gpus_per_node
    per_node = len(gpus) or NODE if per_node is None else per_node
    sizes = hierarchical_sizes(command.tp, command.cp, per_node)
    if command.cp > 1:
        flags = sizes.flags or "no --hierarchical-context-parallel-sizes"
        sizes_text = f"TP {command.tp}, CP {command.cp}, {per_node} GPUs per node"
        yield ok("sizes", f"for {sizes_text}: {flags} ({sizes.reason})")
    if arguments.megatron:
        te = installed.version(*installed.PACKAGES["Transformer Engine"])
        yield from hazards(command, per_node, here, te)
        yield from refusals(command, te)

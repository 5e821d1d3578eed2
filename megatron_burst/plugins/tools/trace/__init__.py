# SPDX-License-Identifier: Apache-2.0
"""`megatron-burst trace`: record when every rank computes, sends and waits.

The command starts ranks on this machine and runs one attention call on them. With `--events` it
reads traces of torch's profiler from an earlier run instead. It writes a picture, or a trace in
Chrome's format (Perfetto). `record` extracts events from a profile, and `picture` draws them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ....cli.console import progress
from ....schedule.algorithms import ALGORITHMS
from .. import call_flags
from . import record

RANKS = 16  # maximum number of processes that this command starts
SIZES = ("nodes", "per_node", "tokens", "heads", "kv_heads", "width", "head_chunks")

LOOPBACK = "the times are of this machine's CPU and loopback device, not of GPUs and a network"
EPILOG = """\
examples:
  megatron-burst trace --nodes 2 --per-node 2 --out burst.png --chrome burst.json
  megatron-burst trace --head-chunks 4 --out chunks.png
  megatron-burst trace --events burst.json --out burst.png
  megatron-burst trace --events rank-0.json.gz rank-1.json.gz --out run.png

The command runs forward and backward of one causal attention call (fp32, batch 1,
layout zigzag) in one process per rank on this machine. With --device cpu the order
of events is real, but their times are of this CPU and its loopback device.
--chrome: open the file in https://ui.perfetto.dev or chrome://tracing.
--events: also reads traces of torch.profiler from your own run, one per rank.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `trace`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add = parser.add_argument
    call_flags.add_out(parser, "draw a picture")
    add("--chrome", type=Path, metavar="FILE", help="write a Chrome trace")
    add("--events", type=Path, nargs="+", metavar="FILE",
        help="read these traces of --chrome or torch.profiler instead of running attention",
    )  # fmt: skip
    call_flags.add_grid(parser, 2, 2)
    rings = [*ALGORITHMS, "auto"]
    add("--algorithm", default="burst", choices=rings, help="default: burst")
    call_flags.add_side(parser)
    add("--tokens", type=int, metavar="N", default=512, help="tokens per rank (default: 512)")
    call_flags.add_heads(parser, width=64)
    add("--head-chunks", type=int, metavar="N", default=1,
        help="groups of heads; one is sent while another computes (default: 1)")  # fmt: skip
    add(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="device of the ranks (default: cpu)",
    )


def run(arguments: argparse.Namespace) -> None:
    """Record or read a trace, and write the files of `--out` and `--chrome`.

    Raises:
        ValueError: Flags are invalid, or a rank fails.
    """
    call_flags.check_out(arguments.out)
    if not (arguments.out or arguments.chrome):
        raise ValueError("no output file; set --out FILE or --chrome FILE")
    call_flags.check_place(arguments.chrome, "--chrome")
    if arguments.events:
        trace = record.load(arguments.events)
    else:
        call_flags.check_positive(arguments, SIZES)
        ranks = arguments.nodes * arguments.per_node
        if ranks > RANKS:
            raise ValueError(
                f"--nodes x --per-node must be at most {RANKS} processes, got {ranks}; use fewer"
            )
        from . import local  # imports torch, which takes seconds

        with progress(f"tracing {ranks} ranks"):
            trace = local.run(arguments)
        if arguments.device == "cpu":
            print(LOOPBACK, file=sys.stderr)
    if arguments.chrome:
        record.save(trace, arguments.chrome)
        print(arguments.chrome)
    if arguments.out:
        from . import picture

        picture.draw(trace, arguments.out)
        print(arguments.out)

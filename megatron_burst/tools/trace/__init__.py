"""`megatron-burst trace`: record when every rank computes, sends and waits.

The command runs one attention call on ranks of this machine, or reads what torch's profiler wrote
in an earlier run, and writes a picture or a trace for Chrome's viewer or Perfetto. `record` takes
the events out of a profile, and `picture` draws them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ...schedule.algorithms import ALGORITHMS
from .. import call_flags
from . import record

RANKS = 16  # the most processes that this command starts
SIZES = ("nodes", "ranks_per_node", "tokens", "heads", "kv_heads", "width", "head_chunks")

EPILOG = """\
examples:
  megatron-burst trace --nodes 2 --ranks-per-node 2 --png burst.png --chrome burst.json
  megatron-burst trace --head-chunks 4 --png chunks.png
  megatron-burst trace --events burst.json --png burst.png
  megatron-burst trace --events rank0.json rank1.json --png mine.png

The ranks run forward and backward of one causal attention call in fp32, batch 1, with the
layout zigzag. Open the file of --chrome in chrome://tracing or https://ui.perfetto.dev. --events
also takes what torch.profiler's export_chrome_trace wrote on the ranks of your own run.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `trace`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add = parser.add_argument
    add("--png", type=Path, metavar="FILE", help="write a picture")
    add("--chrome", type=Path, metavar="FILE", help="write a Chrome trace")
    add("--events", type=Path, nargs="+", metavar="FILE",
        help="read Chrome traces, of this command or of torch's profiler, instead of running",
    )  # fmt: skip
    add("--nodes", type=int, metavar="N", default=2, help="number of nodes (default: 2)")
    add(
        "--ranks-per-node", type=int, metavar="N", default=2, help="ranks on each node (default: 2)"
    )
    rings = [*ALGORITHMS, "auto"]
    add("--algorithm", default="burst", choices=rings, help="default: burst")
    call_flags.add_side(parser)
    add("--tokens", type=int, metavar="N", default=512, help="tokens per rank (default: 512)")
    call_flags.add_heads(parser, width=64)
    add("--head-chunks", type=int, metavar="N", default=1,
        help="chunks of heads whose rings run one behind the other (default: 1)")  # fmt: skip
    add("--device", choices=("cpu", "cuda"), default="cpu", help="what the ranks run on (cpu)")


def run(arguments: argparse.Namespace) -> None:
    """Record or read a trace, and write the files asked for. Raises ValueError for bad flags."""
    if not (arguments.png or arguments.chrome):
        raise ValueError("say what to write: --png FILE or --chrome FILE")
    call_flags.check_place(arguments.png, "--png")
    call_flags.check_place(arguments.chrome, "--chrome")
    if arguments.events:
        trace = record.load(arguments.events)
    else:
        call_flags.check_positive(arguments, SIZES)
        ranks = arguments.nodes * arguments.ranks_per_node
        if ranks > RANKS:
            raise ValueError(f"--nodes x --ranks-per-node: at most {RANKS} processes, got {ranks}")
        from . import local  # imports torch, which takes seconds

        trace = local.run(arguments)
    if arguments.chrome:
        record.save(trace, arguments.chrome)
        print(arguments.chrome)
    if arguments.png:
        from . import picture

        picture.draw(trace, arguments.png)
        print(arguments.png)

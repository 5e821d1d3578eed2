"""`megatron-burst trace`: record when every rank computes, sends and waits.

The command runs one attention call on ranks of this machine, or reads what torch's profiler wrote
in an earlier run, and writes a picture or a trace for Chrome's viewer or Perfetto. `record` takes
the events out of a profile, and `picture` draws them.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from ...schedule.algorithms import ALGORITHMS
from ...schedule.tables import SIDES
from . import record

RANKS = 16  # the most processes that this command starts

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
    parser.add_argument("--png", type=Path, metavar="FILE", help="write a picture")
    parser.add_argument("--chrome", type=Path, metavar="FILE", help="write a Chrome trace")
    parser.add_argument(
        "--events", type=Path, nargs="+", metavar="FILE",
        help="read Chrome traces, of this command or of torch's profiler, instead of running",
    )  # fmt: skip
    parser.add_argument(
        "--nodes", type=int, metavar="N", default=2, help="number of nodes (default: 2)"
    )
    parser.add_argument(
        "--ranks-per-node", type=int, metavar="N", default=2, help="ranks on each node (default: 2)"
    )
    rings = [*ALGORITHMS, "auto"]
    parser.add_argument("--algorithm", default="burst", choices=rings, help="default: burst")
    parser.add_argument(
        "--side",
        default="auto",
        choices=("auto", *SIDES),
        help="which tensors travel in backward (default: the side with fewer bytes)",
    )
    parser.add_argument(
        "--tokens", type=int, metavar="N", default=512, help="tokens per rank (default: 512)"
    )
    parser.add_argument(
        "--heads", type=int, metavar="N", default=8, help="query heads (default: 8)"
    )
    parser.add_argument(
        "--kv-heads", type=int, metavar="N", default=8, help="key and value heads (default: 8)"
    )
    parser.add_argument(
        "--width", type=int, metavar="N", default=64, help="width of a head (default: 64)"
    )
    parser.add_argument(
        "--head-chunks",
        type=int,
        metavar="N",
        default=1,
        help="chunks of heads whose rings run one behind the other (default: 1)",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="what the ranks run on (cpu)"
    )


def run(arguments: argparse.Namespace) -> None:
    """Record or read a trace, and write the files asked for. Raises ValueError for bad flags."""
    if not (arguments.png or arguments.chrome):
        raise ValueError("say what to write: --png FILE or --chrome FILE")
    if arguments.png and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--png needs matplotlib: pip install 'megatron-burst[show]'")
    trace = record.load(arguments.events) if arguments.events else _run(arguments)
    if arguments.chrome:
        record.save(trace, arguments.chrome)
        print(arguments.chrome)
    if arguments.png:
        from . import picture

        picture.draw(trace, arguments.png)
        print(arguments.png)


def _run(arguments: argparse.Namespace) -> record.Trace:
    from . import local

    for name in ("nodes", "ranks_per_node", "tokens", "heads", "kv_heads", "width", "head_chunks"):
        if getattr(arguments, name) < 1:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} must be at least 1, got {getattr(arguments, name)}")
    ranks = arguments.nodes * arguments.ranks_per_node
    if ranks > RANKS:
        raise ValueError(f"--nodes x --ranks-per-node: at most {RANKS} processes, got {ranks}")
    return local.run(
        local.TracedCall(
            arguments.nodes, arguments.ranks_per_node, arguments.algorithm, arguments.side,
            arguments.tokens, arguments.heads, arguments.kv_heads, arguments.width,
            arguments.head_chunks, arguments.device,
        )
    )  # fmt: skip

# SPDX-License-Identifier: Apache-2.0
"""`megatron-burst calibrate`: measure a cluster, and write the file that `advise --cluster` reads.

    torchrun --nnodes 2 --nproc-per-node 8 ... -m megatron_burst calibrate --out cluster.toml
    megatron-burst calibrate                              # one GPU, which says what is missing

All ranks measure together; the first one writes. It is written for GPUs, but so far it has been run
only on CPU ranks. Exit status: 0 written, 2 bad input.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ....autotune.gpus import GPUS
from ..advise.shapes import models
from ..call_flags import named

EPILOG = """\
Start it on all ranks of the cluster, for instance on each of two nodes:
  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
      -m megatron_burst calibrate --out cluster.toml
and use the file with: megatron-burst advise --cluster cluster.toml ...

What cannot be measured, such as links between nodes on a single node, is the
published rate of the GPU; the file says so beside each figure.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `calibrate`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add = parser.add_argument
    add("--out", type=Path, default=Path("cluster.toml"), metavar="FILE",
        help="file that rank 0 writes (cluster.toml)")  # fmt: skip
    add("--minutes", type=float, default=3.0, metavar="N", help="time to spend, roughly (3)")
    add("--gpu", metavar="NAME", help="type of GPU, for published rates of what is not measured: "
        f"{', '.join(GPUS)} (by the device's name)")  # fmt: skip
    add("--model", default="llama3-8b", metavar="NAME",
        help="model whose shapes are measured, as of advise --model (llama3-8b)")  # fmt: skip
    add(*named("--per-node"), type=int, metavar="N", help="ranks per node (those on one host)")


def run(arguments: argparse.Namespace) -> int:
    """Measure and write. Raises the same ValueError on all ranks."""
    if not arguments.minutes > 0:
        raise ValueError(f"--minutes must be above 0, got {arguments.minutes}")
    model = models.named(arguments.model)
    if arguments.gpu is not None and arguments.gpu.lower() not in GPUS:
        raise ValueError(f"--gpu {arguments.gpu}: unknown; one of {', '.join(GPUS)}")
    from .figures import calibrate  # imports torch, which takes seconds

    calibrate(model, arguments)
    return 0

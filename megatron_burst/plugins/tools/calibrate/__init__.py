# SPDX-License-Identifier: Apache-2.0
"""`megatron-burst calibrate`: measure a cluster; write the file that `advise --cluster` reads.

    torchrun --nnodes 2 --nproc-per-node 8 ... -m megatron_burst calibrate --out cluster.toml
    megatron-burst calibrate                    # one GPU; lists the figures that are not measured

All ranks measure together, and rank 0 writes the file. The command is meant for GPUs, but it was
tested only with CPU ranks. Exit status: 0 if the file is written, 2 for invalid input.
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

A figure that cannot be measured, such as links between nodes on a single node,
gets the published rate of the GPU; a comment in the file marks such figures.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `calibrate`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add = parser.add_argument
    add("--out", type=Path, default=Path("cluster.toml"), metavar="FILE",
        help="file that rank 0 writes (cluster.toml)")  # fmt: skip
    add("--minutes", type=float, default=3.0, metavar="N",
        help="approximate duration of all measurements in minutes (3)")  # fmt: skip
    add("--gpu", metavar="NAME", help="type of GPU, for published rates of figures that are not "
        f"measured: {', '.join(GPUS)} (default: from the device's name)")  # fmt: skip
    add("--model", default="llama3-8b", metavar="NAME",
        help="model whose shapes are measured, a name of advise --model (llama3-8b)")  # fmt: skip
    add(*named("--per-node"), type=int, metavar="N",
        help="ranks per node (default: ranks with the same host)")  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Measure the cluster and write the file.

    Raises:
        ValueError: Flags are invalid, or a measurement fails. All ranks raise the same error.
    """
    if not arguments.minutes > 0:
        raise ValueError(f"--minutes must be above 0, got {arguments.minutes}")
    model = models.named(arguments.model)
    if arguments.gpu is not None and arguments.gpu.lower() not in GPUS:
        raise ValueError(f"--gpu {arguments.gpu}: unknown; use one of {', '.join(GPUS)}")
    from .figures import calibrate  # imports torch, which takes seconds

    calibrate(model, arguments)
    return 0

"""Fastest blocks of the Triton kernels on this GPU: candidates and the stored blocks in turns.

It is not part of the standard run: every candidate is compiled, which takes longer than all else.
`benchmarks/gpu.sh --parts blocks` times them and prints entries for
`megatron_burst/kernels/blocks.py`. A candidate with a wrong result, or with too large blocks for
the device, has no time.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_burst.kernels.blocks import BlockSizes, blocks
from megatron_burst.kernels.triton_kernel import TritonKernel, capability

from .attention import FORWARD, KV, Bench, Cell, timed_record
from .clock import Clock, forget
from .rivals import Cannot
from .sizes import Sizes

WIDTHS = (128, 64, 256)
DIRECTIONS = ("forward", "backward")
CANDIDATES = {
    "forward": (
        BlockSizes(128, 128, 8, 2), BlockSizes(128, 128, 8, 3), BlockSizes(128, 64, 8, 3),
        BlockSizes(128, 64, 4, 3), BlockSizes(64, 128, 4, 2), BlockSizes(64, 64, 4, 3),
        BlockSizes(128, 32, 4, 3),
    ),
    "backward": (
        BlockSizes(64, 128, 8, 2), BlockSizes(64, 64, 4, 2), BlockSizes(64, 64, 8, 2),
        BlockSizes(64, 64, 8, 1),
        BlockSizes(32, 128, 8, 2), BlockSizes(64, 32, 8, 1), BlockSizes(32, 32, 4, 2),
    ),
}  # fmt: skip
Record = dict[str, Any]


class Candidate(TritonKernel):
    """The kernel with other blocks in one direction and the stored blocks in the other."""

    def __init__(self, direction: str, size: BlockSizes):
        super().__init__()
        self.direction, self.candidate = direction, size

    def _size(self, direction: str, q: torch.Tensor, v: torch.Tensor) -> BlockSizes:
        return self.candidate if direction == self.direction else super()._size(direction, q, v)


def measure(
    direction: str, width: int, cell: Cell, sizes: Sizes, clock: Clock,
    dtype: torch.dtype = torch.bfloat16,
) -> Record:  # fmt: skip
    """Measure candidates like kernels in `attention.measure`, and add the fastest one's entry."""
    forget(clock.device)
    bench = Bench(cell, width, clock, dtype)
    device, name = capability(clock.device), FORWARD if direction == "forward" else KV
    tried = {str(size): size for size in (*CANDIDATES[direction], blocks(device, direction, width))}
    for who, size in tried.items():
        bench.admit(who, lambda who=who, size=size: _run(bench, who, name, direction, size))
    record = timed_record(bench, sizes) | {"kind": "blocks", "direction": direction, "width": width}
    best = min(record["runs"], key=lambda run: sorted(run["seconds"])[len(run["seconds"]) // 2],
               default=None)  # fmt: skip
    entry = f'({device}, "{direction}", {width}): {best["who"]},' if best else None
    return record | {"entry": entry}


def _run(bench: Bench, who: str, name: str, direction: str, size: BlockSizes) -> None:
    try:
        bench.kernel(who, Candidate(direction, size), (name,))
    except Exception as error:
        if type(error).__name__ == "OutOfResources":  # triton's; it is not imported here
            raise Cannot(str(error)) from error
        raise

# SPDX-License-Identifier: Apache-2.0
"""Block sizes of the Triton kernels by device and width, in one table.

No kernel is tuned while a model trains: what is not in the table takes the entry of the next
older device and of the next greater width. Hopper's were chosen by time on an H100 (but for the
backward of width 256), with Triton 3.6, by `benchmarks/gpu.sh --parts blocks`, which prints what
belongs in the table; the others by what the compiler says of registers and spills (`python -m
benchmarks.triton_compile`).
"""

from __future__ import annotations

from typing import NamedTuple


class BlockSizes(NamedTuple):
    """Tiles of `rows` x `columns` (powers of two; columns at least 32); warps; stages of loads
    in flight.
    """

    rows: int
    columns: int
    warps: int
    stages: int


# (compute capability, pass, greatest width) -> blocks, for 16-bit inputs
BLOCKS: dict[tuple[int, str, int], BlockSizes] = {
    (80, "forward", 64): BlockSizes(64, 32, 4, 2),
    (80, "forward", 128): BlockSizes(64, 64, 8, 1),
    (80, "forward", 256): BlockSizes(32, 32, 4, 1),
    (80, "backward", 64): BlockSizes(32, 64, 4, 1),
    (80, "backward", 128): BlockSizes(64, 64, 8, 1),
    (80, "backward", 256): BlockSizes(32, 32, 8, 1),
    (90, "forward", 64): BlockSizes(64, 128, 4, 2),
    (90, "forward", 128): BlockSizes(128, 64, 4, 3),
    (90, "forward", 256): BlockSizes(128, 64, 8, 2),
    (90, "backward", 64): BlockSizes(64, 128, 8, 2),
    (90, "backward", 128): BlockSizes(64, 128, 8, 2),
    (90, "backward", 256): BlockSizes(64, 32, 8, 1),
    (100, "forward", 64): BlockSizes(128, 128, 8, 3),
    (100, "forward", 128): BlockSizes(128, 128, 8, 2),
    (100, "forward", 256): BlockSizes(128, 64, 8, 2),
    (100, "backward", 64): BlockSizes(64, 128, 8, 2),
    (100, "backward", 128): BlockSizes(64, 64, 8, 2),
    (100, "backward", 256): BlockSizes(64, 32, 8, 1),
}
# sm_120 has no more shared memory than the smallest of the sm_80s.
BLOCKS |= {(120, way, width): size for (old, way, width), size in BLOCKS.items() if old == 80}
# For float32, on any device: its products are not done by tensor cores, and need no large blocks.
FLOAT32_BLOCKS = {
    ("forward", 64): BlockSizes(32, 32, 4, 1),
    ("forward", 128): BlockSizes(32, 32, 4, 1),
    ("forward", 256): BlockSizes(32, 32, 8, 1),
    ("backward", 64): BlockSizes(32, 32, 4, 1),
    ("backward", 128): BlockSizes(32, 32, 8, 1),
    ("backward", 256): BlockSizes(16, 32, 8, 1),
}
WIDEST = 256


def blocks(capability: int, direction: str, width: int, itemsize: int = 2) -> BlockSizes:
    """The entry for a device (9.0 is 90), "forward" or "backward", and the greater width; for
    inputs of `itemsize` bytes.
    """
    if itemsize == 4:
        limits = (limit for _, limit in FLOAT32_BLOCKS)
        return FLOAT32_BLOCKS[direction, min(limit for limit in limits if limit >= width)]
    devices = sorted({device for device, _, _ in BLOCKS})
    device = max([known for known in devices if known <= capability] or devices[:1])
    width = min(limit for known, _, limit in BLOCKS if known == device and limit >= width)
    return BLOCKS[device, direction, width]

# SPDX-License-Identifier: Apache-2.0
"""The table of block sizes of the Triton kernels, by device and head width.

There is no autotuning during training. If the table lacks an entry, the entry of the next older
device and the next larger width is used. Entries for Hopper were measured on an H100 with Triton
3.6 (`benchmarks/gpu.sh --parts blocks`), except the entry for backward with width 256. Other
entries were chosen by the numbers of registers and spills that the compiler reports
(`python -m benchmarks.triton_compile`).
"""

from __future__ import annotations

from typing import NamedTuple


class BlockSizes(NamedTuple):
    """Tile size and launch options of a kernel.

    Attributes:
        rows: Query rows of a tile, a power of two.
        columns: Columns (keys) of a tile, a power of two of at least 32.
        warps: Warps per program.
        stages: Stages of the software pipeline of loads (Triton's `num_stages`).
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
# sm_120 has no more shared memory than the smallest device of the sm_80 generation.
BLOCKS |= {(120, way, width): size for (old, way, width), size in BLOCKS.items() if old == 80}
# For float32, on any device: products do not use tensor cores, so blocks can be small.
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
    """Return the block sizes of a Triton kernel for a device and head width.

    Args:
        capability: Compute capability, 90 for 9.0.
        direction: "forward" or "backward".
        width: The larger width of keys and values.
        itemsize: Bytes of an input element.
    """
    if itemsize == 4:
        limits = (limit for _, limit in FLOAT32_BLOCKS)
        return FLOAT32_BLOCKS[direction, min(limit for limit in limits if limit >= width)]
    devices = sorted({device for device, _, _ in BLOCKS})
    device = max([older for older in devices if older <= capability] or devices[:1])
    width = min(limit for entry, _, limit in BLOCKS if entry == device and limit >= width)
    return BLOCKS[device, direction, width]

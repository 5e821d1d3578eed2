"""A script: the mask functions for FlashAttention 4 run on the CPU, which CuTe DSL compiles for.

    FLASH_ATTENTION_ARCH=sm_90 CUTE_DSL_ARCH=sm_90a python tests/kernels/flash4_masks_run.py

Needs the package and no GPU. Compares every function at all pairs with matrices written by hand.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack
from flash_attn.cute import utils

from megatron_burst.kernels import flash4_masks

ROWS, COLUMNS = 200, 300


class Lengths(NamedTuple):
    seqlen_k: cutlass.Int32


@cute.jit
def fill(
    mask_mod: cutlass.Constexpr,
    step: cutlass.Constexpr,
    seen: cute.Tensor,
    first: cute.Tensor,
    second: cute.Tensor,
    columns: cutlass.Int32,
):
    for i in range(cute.size(seen, mode=[0])):
        for j in range(cute.size(seen, mode=[1])):
            row = utils.scalar_to_ssa(cutlass.Int32(i), cutlass.Int32)
            column = utils.scalar_to_ssa(cutlass.Int32(j * step), cutlass.Int32)
            value = mask_mod(row, row, row, column, Lengths(columns), [first, second])
            seen[i, j] = cutlass.Int32(utils.ssa_to_scalar(value))


def run(mask_mod, *tensors):
    """Return what a function gives for all pairs, as bool [rows, columns]."""
    step = getattr(mask_mod, "__vec_size__", 1)
    seen = torch.full((ROWS, -(-COLUMNS // step)), -7, dtype=torch.int32)
    given = [*(from_dlpack(x) for x in (seen, *tensors)), cutlass.Int32(COLUMNS)]
    cute.compile(fill, mask_mod, step, *given)(*given)
    if step > 1:
        seen = (seen[..., None] >> torch.arange(step) & 1).flatten(1)[:, :COLUMNS]
    return seen == 1


torch.manual_seed(0)
row, column = torch.arange(ROWS)[:, None], torch.arange(COLUMNS)[None]
begin = torch.randint(0, COLUMNS, (ROWS,), dtype=torch.int32)
end = torch.minimum(begin + torch.randint(0, 90, (ROWS,)), torch.tensor(COLUMNS)).int()
begin[0] = end[0] = 0
begin[1], end[1] = 0, COLUMNS
bits = torch.randint(-(2**31), 2**31 - 1, (5, 128, 4), dtype=torch.int32)
numbers = torch.randint(0, 5, (2, 4), dtype=torch.int32)
words = bits[numbers[row // 128, column // 128], row % 128, column % 128 // 32]
wanted = {
    "intervals": (column >= begin[:, None]) & (column < end[:, None]),
    "tables": (words >> column % 32) & 1 == 1,
}
for name, matrix in wanted.items():
    tensors = (begin, end) if name == "intervals" else (bits.flatten(), numbers.flatten())
    for function in (name, f"{name}_packed"):
        assert torch.equal(run(getattr(flash4_masks, function), *tensors), matrix), function
print("4 functions agree")

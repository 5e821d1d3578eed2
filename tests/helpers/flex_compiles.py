"""A script: the programs of the kernel flex as Inductor writes them, through the assembler.

Prints one JSON line: a list of [program, mask, softcap, device, registers, spills, shared memory].
Needs Triton and a torch built for CUDA, and no GPU. Block sizes are those for an H100.
"""

import json
from itertools import product

import inductor_without_gpu
import torch

from benchmarks.triton_compile import compiled
from megatron_burst.kernels import flex_programs
from megatron_burst.kernels.flex_programs import BackwardProgram, ForwardProgram, ProgramShape

HOPPER, BLACKWELL = 90, 100

if __name__ == "__main__":
    found = []
    cases = [("rows", None), ("columns", None), ("tables", None), ("tables", 30.0)]
    for (mask, softcap), kind in product(cases, (ForwardProgram, BackwardProgram)):
        shape = ProgramShape(
            torch.device("cuda:0"), torch.bfloat16, 1, (32, 8), (128, 128), (32768, 32768), mask,
            64 * (mask == "tables"), 0.1, softcap, kind is ForwardProgram,
        )  # fmt: skip
        made = kind(shape)
        code = inductor_without_gpu.code_for_hopper(lambda made=made: flex_programs.compiled(made))
        for source, options in inductor_without_gpu.templates(code):
            for device in (HOPPER, BLACKWELL):
                result = compiled(source, device, options)
                sizes = result.registers, result.spills, result.shared
                found.append([kind.__name__, mask, softcap, device, *sizes])
    print(json.dumps(found))

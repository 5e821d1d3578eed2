"""A script: the benchmark of block sizes, tiny, by Triton's interpreter; see `interpreted`."""

import json

import torch

from benchmarks.gpu import tables, tuning
from benchmarks.gpu.attention import Cell
from benchmarks.gpu.cases import cases
from benchmarks.gpu.clock import Clock
from benchmarks.gpu.sizes import CPU
from megatron_burst.kernels import triton_kernel
from megatron_burst.kernels.blocks import BlockSizes

SMALL, WRONG, LARGE = BlockSizes(32, 32, 4, 1), BlockSizes(32, 64, 4, 1), BlockSizes(64, 64, 4, 1)
tuning.CANDIDATES = dict.fromkeys(tuning.DIRECTIONS, (SMALL, WRONG, LARGE))
real = triton_kernel._launch


class OutOfResources(Exception):
    """As triton's, of a device that has too little memory for a block."""


def launch(code, q, programs, heads, size):
    """One candidate leaves its last block out, another does not fit."""
    if size == LARGE:
        raise OutOfResources("shared memory")
    return real(code, q, programs - (size == WRONG), heads, size)


triton_kernel._launch = launch
case = next(c for c in cases(128, 32, 32) if "own keys" in c.name)
records = [
    tuning.measure(
        direction, 16, Cell(case, (2, 1), 128), CPU, Clock(torch.device("cpu")), torch.float16
    )
    for direction in tuning.DIRECTIONS
]
jobs = {str(n): record for n, record in enumerate(records)}
results = {"jobs": jobs, "commands": [], "machine": "", "versions": "", "left out": []}
print(json.dumps({"records": records, "text": tables.markdown(results)}))

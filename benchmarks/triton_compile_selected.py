"""Compile the Triton kernels of sparse attention for absent devices; print registers and spills.

Like `triton_compile`, for `plugins/sparse/selected_triton`: it needs Triton and no GPU. For each
kind of model, with the heads of one tensor-parallel rank, it records the launches of
`SelectedTriton`, and Triton's JIT compiles them. The exit status is 1 if a kernel does not compile,
spills, or needs more shared memory than the device has.

    python -m benchmarks.triton_compile_selected --devices 90 --models dsa
    python -m benchmarks.triton_compile_selected --blocks 32 32 8 1
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import torch

from megatron_burst.kernels.base import Rows, Scoring
from megatron_burst.layout import Span
from megatron_burst.masks import Causal
from megatron_burst.plugins.sparse.pairs import SelectedPairs
from megatron_burst.plugins.sparse.selected_triton import HeadBlocks, SelectedTriton
from megatron_burst.plugins.sparse.selection import Selection

from .triton_compile import (
    DTYPES,
    SHARED,
    Device,
    Made,
    assembled,
    parser_of,
    report_all,
    shape,
)

DEVICES = (90, 100)
ROWS = 16
KERNELS = "find", "forward", "backward_queries", "backward_keys"


class Model(NamedTuple):
    """Shape of the sparse attention of a model.

    Attributes:
        block: Number of keys of a unit.
        top_k: Number of units that a row selects.
        selections: Number of selections of a row.
        width: Columns of keys that are sent.
        value_width: Columns of values.
        latent: True if values are a part of the keys.
    """

    block: int
    top_k: int
    selections: int
    heads: int
    key_heads: int
    width: int
    value_width: int
    latent: bool


MODELS = {
    "dsa": Model(1, 2048, 1, 128, 1, 64, 512, True),
    "qsa": Model(4, 512, 1, 24, 2, 256, 256, False),
    "msa": Model(128, 16, 4, 64, 4, 128, 128, False),
    "moba": Model(512, 8, 32, 32, 8, 128, 128, False),
}


class Launch(NamedTuple):
    device: int
    model: str
    kernel: str
    dtype: str
    size: HeadBlocks | None


def main() -> int:
    args = _arguments()
    size = None if args.blocks is None else HeadBlocks(*args.blocks)
    launches = [Launch(*fields, size) for fields in product(args.devices, args.models, args.kernels,
                                                            args.dtypes)]  # fmt: skip
    heads = "device", "model", "kernel", "dtype", "blocks", "registers", "spilled", "shared KB"

    def compile_launch(launch: Launch) -> list[tuple[list[str], bool]]:
        blocks, made = build(launch)
        bad = made.spills > 0 or made.held > 0 or made.shared > SHARED[launch.device]
        return [([blocks, *made.words], bad)]

    return report_all(launches, heads, lambda x: [f"sm_{x.device}", *x[1:4]], compile_launch)


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, DEVICES, ("HEADS", "KEYS", "WARPS", "STAGES"))
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=list(KERNELS))
    return parser.parse_args()


def build(launch: Launch) -> tuple[str, Made]:
    """Compile a kernel as launched; return its blocks in words, and the assembler's report."""
    from triton.runtime import driver  # pyright: ignore[reportMissingImports]

    driver.set_active(Device(launch.device))  # nothing is launched from this process
    code, arguments, named = _recorded(launch)
    made = assembled(code.warmup(*arguments, grid=(1,), **named), launch.device)
    words = ""
    if "M" in named:
        words = shape(named["M"], named["N"], named["num_warps"], named["num_stages"])
    return words, made


class _Recording:
    """Replacement of a kernel that keeps its launch."""

    def __init__(self, code: Any):
        self.code, self.launch = code, None

    def __getitem__(self, grid: object) -> Any:
        def call(*arguments: Any, **named: Any) -> None:
            self.launch = self.code, arguments, named

        return call


def _recorded(launch: Launch) -> tuple[Any, tuple, dict[str, Any]]:
    """Return kernel, arguments, constants and options of a launch over the first keys."""
    from megatron_burst.plugins.sparse import selected_code

    model, dtype = MODELS[launch.model], DTYPES[launch.dtype]
    keys = 2 * model.block * model.top_k
    ids = torch.zeros(ROWS, 1, model.selections, model.top_k, dtype=torch.int32)
    selection = Selection(ids, None, Causal(), model.block)  # pyright: ignore[reportArgumentType]
    kernel = SelectedTriton(selection, model.latent, launch.size)
    work = SelectedPairs(Causal(), [Span(keys, 1, ROWS)], [Span(0, 1, keys)])

    def tensor(rows: int, *sizes: int, of: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(rows, 1, *sizes, dtype=of)  # memory that no kernel touches

    h, n, d, w = model.heads, model.key_heads, model.width, model.value_width
    whole = d + w if model.latent else d
    q, dout = tensor(ROWS, h, whole, of=dtype), tensor(ROWS, h, w, of=dtype)
    k, v = tensor(keys, n, d, of=dtype), tensor(keys, n, w, of=dtype)
    lse, scoring = tensor(ROWS, h), Scoring(whole**-0.5)
    recording = _Recording(getattr(selected_code, launch.kernel))
    others: Any = {name: _Recording(None) for name in KERNELS} | {launch.kernel: recording}
    with mock.patch.multiple(selected_code, **others):
        if launch.kernel.startswith("backward"):
            sums = tensor(ROWS, h, whole), tensor(keys, n, d), tensor(keys, n, w)
            kernel.backward(Rows(q, dout, lse, lse), k, v, work, scoring, *sums)
        else:
            kernel.forward(q, k, v, work, scoring, tensor(ROWS, h, w), lse)
    assert recording.launch is not None
    return recording.launch


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""The compiled operators of `csrc/`, where they were built.

Decides whether they serve given tensors. The torch code of the same work, in `online_softmax`,
`aten` and `linear_cross_entropy.rows`, asks each function here first and computes itself where the
answer is no. The library lies beside this file (`python setup.py build_csrc`) and is loaded at the
first question; `megatron-burst doctor` says whether it is used.

Shape letters: s query rows, b batch, h query heads, w value width; n rows, v vocabulary rows.
"""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import NamedTuple

import torch

FILE = str(Path(__file__).with_name("libcsrc.so"))
# Operator -> the names of its arguments, by which a library of another version is known.
OPERATORS = {
    "merge_": "out lse part part_lse",
    "delta_out": "dout out delta",
    "stand_in_out": "dout delta out",
    "softmax_gradient_": "z index lse of_softmax of_label of_all real scale softcap exponentials",
}
# Element -> accumulator, as the operators are compiled.
ACCUMULATORS = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}


@functools.cache  # torch keeps a library for good; asking again could not find another
def load(file: str) -> frozenset[str]:
    """The device types that the library serves: cpu, cuda; none where there is no library.

    One that is there and cannot be loaded is a warning: it was built to be used.
    """
    if not Path(file).exists():
        return frozenset()
    trouble = None if _registered("CPU") else _open(file)
    if trouble:
        warnings.warn(
            f"{file} is not used: {trouble}; build it again (python setup.py build_csrc) or remove "
            "it; torch's operators do its work meanwhile",
            stacklevel=2,
        )
        return frozenset()
    return frozenset({"cpu", "cuda"} if _registered("CUDA") else {"cpu"})


def _open(file: str) -> str | None:
    """Load it; why it cannot be used, or None. Only once: it would define its operators again."""
    try:
        torch.ops.load_library(file)
    except OSError as error:
        return str(error.__cause__ or error).splitlines()[0]
    return None if _registered("CPU") else "it lacks operators that this version asks for"


def _registered(key: str) -> bool:
    """Do all operators exist as they are called here, for this kind of device?"""
    defined = torch._C._dispatch_get_all_op_names()
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for name, arguments in OPERATORS.items():
        full = f"megatron_burst::{name}"
        if full not in defined or not has(full, key):
            return False
        schema = getattr(torch.ops.megatron_burst, name).default._schema
        if [argument.name for argument in schema.arguments] != arguments.split():
            return False
    return True


def serves(device: str) -> bool:
    """Is the library here, with operators for this type of device?"""
    return device in load(FILE)


def merge_(
    out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor
) -> bool:
    """`online_softmax.merge_`: was it done? out, part [s, b, h, w], lse, part_lse [s, b, h]."""
    if not (_here(out, lse, part, part_lse) and in_rows(out, part) and out.dtype == lse.dtype):
        return False
    if ACCUMULATORS.get(part.dtype) != out.dtype:
        return False
    torch.ops.megatron_burst.merge_.default(out, lse, part, part_lse.to(lse.dtype))
    changed(out, lse)
    return True


def delta(dout: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """`online_softmax.row_delta` [s, b, h] in `dtype`, or None; dout, out [s, b, h, w]."""
    if not (_here(dout, out) and in_rows(dout, out) and dout.dtype == out.dtype):
        return None
    if ACCUMULATORS.get(dout.dtype) != dtype:
        return None
    found = torch.empty(dout.shape[:-1], dtype=dtype, device=dout.device)
    torch.ops.megatron_burst.delta_out.default(dout, out, found)
    return found


def stand_in(dout: torch.Tensor, delta: torch.Tensor) -> torch.Tensor | None:
    """`kernels.aten.stand_in` [s, b, h, w], or None; dout [s, b, h, w], delta [s, b, h]."""
    if not (_here(dout, delta) and in_rows(dout) and ACCUMULATORS.get(dout.dtype) == delta.dtype):
        return None
    found = torch.empty(dout.shape, dtype=dout.dtype, device=dout.device)
    torch.ops.megatron_burst.stand_in_out.default(dout, delta, found)
    return found


class LogitGradient(NamedTuple):
    """What a tile of logits z [n, v] becomes: (exp(x - lse) of_softmax - of_all, + of_label in
    `column`) dx/dz / scale, with x the logits; all [n].

    A row becomes 0 if its three factors are 0, even if it holds NaN. lse None: z holds
    exp(x - something) by now, and of_softmax what is missing.
    """

    column: torch.Tensor
    lse: torch.Tensor | None
    of_softmax: torch.Tensor
    of_label: torch.Tensor
    of_all: torch.Tensor


def softmax_gradient_(
    z: torch.Tensor, given: LogitGradient, real: int, scale: float, softcap: float | None
) -> bool:
    """Make z [n, v] what is given: was it done? The columns from `real` on become 0."""
    index, lse, *of = given
    rows = index, of[0] if lse is None else lse, *of
    if not (_here(z, *rows) and z.stride(1) == 1 and index.dtype == torch.int64):
        return False
    if any(ACCUMULATORS.get(z.dtype) != row.dtype for row in rows[1:]):
        return False
    torch.ops.megatron_burst.softmax_gradient_.default(
        z, *(row.contiguous() for row in rows), real, scale, softcap or 0.0, lse is None
    )
    changed(z)
    return True


def _here(*tensors: torch.Tensor) -> bool:
    """Are these plain tensors that the library serves?"""
    return plain(*tensors) and tensors[0].device.type in load(FILE)


def plain(*tensors: torch.Tensor) -> bool:
    """Are these tensors of one device with numbers in them, outside of autograd and of
    torch.compile, which cannot see into an operator of ours?
    """
    if torch.compiler.is_compiling():  # and it could not follow what is asked below
        return False
    device, grad = tensors[0].device, torch.is_grad_enabled()
    return all(type(t) is torch.Tensor and t.device == device for t in tensors) and not (
        grad and any(t.requires_grad for t in tensors)
    )


def changed(*tensors: torch.Tensor) -> None:
    """Count a write in place, as torch's own operators do, so that holders of a tensor can see
    it.
    """
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def in_rows(*tensors: torch.Tensor) -> bool:
    """[s, b, h, w] with neighbours in the last dimension, all of one shape."""
    return all(
        t.dim() == 4 and (t.stride(3) == 1 or t.shape[3] == 1) and t.shape == tensors[0].shape
        for t in tensors
    )

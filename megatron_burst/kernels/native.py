# SPDX-License-Identifier: Apache-2.0
"""The compiled operators of `csrc/`, if they were built.

Each function checks whether its operator supports the tensors, and returns False or None if not.
`online_softmax`, `aten` and `linear_cross_entropy.rows` call these functions first, and then use
Triton or torch. The library is in the folder of this module (built by `python setup.py build_csrc`)
and is loaded at first use. `megatron-burst doctor` reports whether the library is used.

Shape letters: s query rows, b batch, h query heads, w value width; n rows, v vocabulary rows.
"""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import NamedTuple

import torch

FILE = str(Path(__file__).with_name("libcsrc.so"))
# Operator -> names of its arguments, to detect a library of another version.
OPERATORS = {
    "merge_": "out lse part part_lse",
    "delta_out": "dout out delta",
    "stand_in_out": "dout delta out",
    "softmax_gradient_": "z index lse of_softmax of_label of_all real scale softcap exponentials",
}
# Element dtype -> accumulation dtype of the compiled operators.
ACCUMULATORS = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}


@functools.cache  # torch never unloads a library
def load(file: str) -> frozenset[str]:
    """Load the library `file`, and return the device types that it supports.

    The result is empty if the file does not exist, or if the library cannot be used. In the second
    case the function warns.
    """
    if not Path(file).exists():
        return frozenset()
    problem = None if _registered("CPU") else _open(file)
    if problem:
        warnings.warn(
            f"{file} is not used: {problem}; rebuild it (python setup.py build_csrc) or remove it; "
            "torch's operators are used instead",
            stacklevel=2,
        )
        return frozenset()
    return frozenset({"cpu", "cuda"} if _registered("CUDA") else {"cpu"})


def _open(file: str) -> str | None:
    """Load the library; return the reason if it cannot be used, else None."""
    try:
        torch.ops.load_library(file)
    except OSError as error:
        return str(error.__cause__ or error).splitlines()[0]
    return None if _registered("CPU") else "it lacks operators that megatron_burst needs"


def _registered(key: str) -> bool:
    """Return True if torch has all `OPERATORS`, with their listed arguments, for a dispatch key."""
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
    """Return True if the library is loaded and has operators for this device type."""
    return device in load(FILE)


def merge_(
    out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor
) -> bool:
    """Merge part into out, like `online_softmax.merge_`; return False if tensors are unsupported.

    Args:
        out: [s, b, h, w], changed in place.
        lse: [s, b, h], changed in place.
        part: [s, b, h, w].
        part_lse: [s, b, h].
    """
    if not (_supported(out, lse, part, part_lse) and in_rows(out, part) and out.dtype == lse.dtype):
        return False
    if ACCUMULATORS.get(part.dtype) != out.dtype:
        return False
    torch.ops.megatron_burst.merge_.default(out, lse, part, part_lse.to(lse.dtype))
    changed(out, lse)
    return True


def delta(dout: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Return `online_softmax.row_delta` [s, b, h]; None if the tensors are unsupported.

    Args:
        dout: [s, b, h, w].
        out: [s, b, h, w].
        dtype: Dtype of the result, the accumulation dtype.
    """
    if not (_supported(dout, out) and in_rows(dout, out) and dout.dtype == out.dtype):
        return None
    if ACCUMULATORS.get(dout.dtype) != dtype:
        return None
    result = torch.empty(dout.shape[:-1], dtype=dtype, device=dout.device)
    torch.ops.megatron_burst.delta_out.default(dout, out, result)
    return result


def stand_in(dout: torch.Tensor, delta: torch.Tensor) -> torch.Tensor | None:
    """Return `kernels.aten.stand_in` [s, b, h, w]; None if the tensors are unsupported.

    Args:
        dout: [s, b, h, w].
        delta: [s, b, h].
    """
    if not (
        _supported(dout, delta) and in_rows(dout) and ACCUMULATORS.get(dout.dtype) == delta.dtype
    ):
        return None
    result = torch.empty(dout.shape, dtype=dout.dtype, device=dout.device)
    torch.ops.megatron_burst.stand_in_out.default(dout, delta, result)
    return result


class LogitGradient(NamedTuple):
    """Coefficients from which the gradient of the logits is computed, for a tile z [n, v].

    z is the product of hidden states and output weights. A logit is x = scale * z, or with a
    softcap x = cap * tanh(scale * z / cap). The gradient of a logit is exp(x - lse) * of_softmax -
    of_all, plus of_label in the column of the label. With a softcap, this is multiplied by 1 - (x /
    cap)^2. If of_softmax, of_label and of_all of a row are 0, the gradient of the row is 0, even if
    the row contains NaN.

    Attributes:
        column: int64 [n], column of the row's label.
        lse: [n], log-sum-exp of the row's logits. None if z contains exp(x - c) for a constant c
            per row; `of_softmax` then includes the factor exp(c - lse).
        of_softmax: [n], factor of the softmax.
        of_label: [n], term that is added in the column of the label.
        of_all: [n], term that is subtracted in all columns.
    """

    column: torch.Tensor
    lse: torch.Tensor | None
    of_softmax: torch.Tensor
    of_label: torch.Tensor
    of_all: torch.Tensor


def softmax_gradient_(
    z: torch.Tensor, gradient: LogitGradient, real: int, scale: float, softcap: float | None
) -> bool:
    """Replace products z by their gradient; return False if the tensors are unsupported.

    Args:
        z: Products [n, v] of hidden states and the rows of the output weight; changed in place.
        gradient: Coefficients of the gradient.
        real: Number of columns that are not padding; gradients of padding columns are 0.
        scale: Factor by which products are multiplied to get logits.
        softcap: Softcap of the logits, or None.
    """
    index, lse, *of = gradient
    rows = index, of[0] if lse is None else lse, *of
    if not (_supported(z, *rows) and z.stride(1) == 1 and index.dtype == torch.int64):
        return False
    if any(ACCUMULATORS.get(z.dtype) != row.dtype for row in rows[1:]):
        return False
    torch.ops.megatron_burst.softmax_gradient_.default(
        z, *(row.contiguous() for row in rows), real, scale, softcap or 0.0, lse is None
    )
    changed(z)
    return True


def _supported(*tensors: torch.Tensor) -> bool:
    return plain(*tensors) and tensors[0].device.type in load(FILE)


def plain(*tensors: torch.Tensor) -> bool:
    """Return True if all tensors are plain `torch.Tensor`s on one device that need no gradient.

    Otherwise, and while torch.compile traces, the result is False: the custom operators support
    neither autograd nor tracing.
    """
    if torch.compiler.is_compiling():  # the checks below cannot be traced
        return False
    device, grad = tensors[0].device, torch.is_grad_enabled()
    return all(type(t) is torch.Tensor and t.device == device for t in tensors) and not (
        grad and any(t.requires_grad for t in tensors)
    )


def changed(*tensors: torch.Tensor) -> None:
    """Increase the version counters of tensors, so that autograd detects an in-place write."""
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def in_rows(*tensors: torch.Tensor) -> bool:
    """Return True if all tensors have one shape [s, b, h, w] and a contiguous last dimension."""
    return all(
        t.dim() == 4 and (t.stride(3) == 1 or t.shape[3] == 1) and t.shape == tensors[0].shape
        for t in tensors
    )

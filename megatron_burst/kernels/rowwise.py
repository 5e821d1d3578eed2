# SPDX-License-Identifier: Apache-2.0
"""Merge, delta and the stand-in output by one Triton launch each, where `csrc/` is not built.

Decides whether Triton serves given tensors. `online_softmax` and `aten` ask here where `native`
has no answer, and else do the same by torch's operators, several launches each. What a launch does
is in `rowwise_code`.

Shape letters: s query rows, b batch, h query heads, w value width.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import torch

from . import native

ELEMENTS = 2048  # of a program, where rows are no wider


def _code(device: str) -> Any:
    """The module of the kernels where they run on this type of device, else None."""
    # Elsewhere only Triton's interpreter runs them, for which somebody has imported Triton.
    if device != "cuda" and "triton" not in sys.modules:
        return None
    if importlib.util.find_spec("triton") is None:
        return None
    from triton.runtime.interpreter import InterpretedFunction  # pyright: ignore

    from . import rowwise_code

    interpreted = isinstance(rowwise_code.merge, InterpretedFunction)
    return rowwise_code if device == "cuda" or interpreted else None


def merge_(
    out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor
) -> bool:
    """`online_softmax.merge_`: was it done? out, part [s, b, h, w], lse, part_lse [s, b, h]."""
    code = _serving(out, lse, part, part_lse)
    if code is None or not native.in_rows(out, part):
        return False
    if not native.ACCUMULATORS.get(part.dtype) == out.dtype == lse.dtype:
        return False
    _launch(code.merge, out.shape, (out, lse, part, part_lse.to(lse.dtype)))
    native.changed(out, lse)
    return True


def delta(dout: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """`online_softmax.row_delta` [s, b, h] in `dtype`, or None; dout, out [s, b, h, w]."""
    code = _serving(dout, out)
    if code is None or not native.in_rows(dout, out):
        return None
    found = torch.empty(dout.shape[:-1], dtype=dtype, device=dout.device)
    _launch(code.delta, dout.shape, (dout, out), found)
    return found


def stand_in(dout: torch.Tensor, delta: torch.Tensor) -> torch.Tensor | None:
    """`aten.stand_in` [s, b, h, w], or None; dout [s, b, h, w], delta [s, b, h]."""
    code = _serving(dout, delta)
    if code is None or not native.in_rows(dout):
        return None
    found = torch.empty(dout.shape, dtype=dout.dtype, device=dout.device)
    largest = torch.finfo(dout.dtype).max if dout.dtype == torch.float16 else 0
    _launch(code.stand_in, dout.shape, (dout, delta), found, LARGEST=largest)
    return found


def _serving(*tensors: torch.Tensor) -> Any:
    return _code(tensors[0].device.type) if native.plain(*tensors) else None


def _launch(
    kernel: Any,
    shape: torch.Size,
    given: tuple[torch.Tensor, ...],
    *found: torch.Tensor,
    **constants: Any,
) -> None:
    """`kernel` over all rows of `shape` [s, b, h, w]; given: of any strides, found: contiguous."""
    s, b, h, w = shape
    width = 1 << max(0, w - 1).bit_length()
    block = max(1, ELEMENTS // width)
    strides = [stride for x in given for stride in x.stride()[:3]]
    if s * b * h * w:
        with torch.cuda.device_of(given[0]):
            kernel[(-(-s * b * h // block),)](
                *given, *found, *strides, s * b * h, b, h, w, **constants, R=block, W=width
            )

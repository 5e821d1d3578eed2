# SPDX-License-Identifier: Apache-2.0
"""Merge, delta and stand-in output as one Triton launch each, used if `csrc/` is not built.

`online_softmax` and `aten` call these functions if `native` does not support the tensors. Each
function returns False or None if Triton does not support the tensors. The callers then use several
torch operators. `rowwise_code` has the Triton kernels.

Shape letters: s query rows, b batch, h query heads, w value width.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import torch

from . import native

ELEMENTS = 2048  # per program, unless a row is wider


def _code(device: str) -> Any:
    """Return the module of the Triton kernels; None if they do not run on this device type."""
    # On other devices only Triton's interpreter runs kernels. Use it only if Triton was imported.
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
    """Merge part into out, like `online_softmax.merge_`; return False if tensors are unsupported.

    Args:
        out: [s, b, h, w], changed in place.
        lse: [s, b, h], changed in place.
        part: [s, b, h, w].
        part_lse: [s, b, h].
    """
    code = _serving(out, lse, part, part_lse)
    if code is None or not native.in_rows(out, part):
        return False
    if not native.ACCUMULATORS.get(part.dtype) == out.dtype == lse.dtype:
        return False
    _launch(code.merge, out.shape, (out, lse, part, part_lse.to(lse.dtype)))
    native.changed(out, lse)
    return True


def delta(dout: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Return `online_softmax.row_delta` [s, b, h]; None if the tensors are unsupported.

    Args:
        dout: [s, b, h, w].
        out: [s, b, h, w].
        dtype: Dtype of the result, the accumulation dtype.
    """
    code = _serving(dout, out)
    if code is None or not native.in_rows(dout, out):
        return None
    result = torch.empty(dout.shape[:-1], dtype=dtype, device=dout.device)
    _launch(code.delta, dout.shape, (dout, out), result)
    return result


def stand_in(dout: torch.Tensor, delta: torch.Tensor) -> torch.Tensor | None:
    """Return `aten.stand_in` [s, b, h, w]; None if the tensors are unsupported.

    Args:
        dout: [s, b, h, w].
        delta: [s, b, h].
    """
    code = _serving(dout, delta)
    if code is None or not native.in_rows(dout):
        return None
    result = torch.empty(dout.shape, dtype=dout.dtype, device=dout.device)
    largest = torch.finfo(dout.dtype).max if dout.dtype == torch.float16 else 0
    _launch(code.stand_in, dout.shape, (dout, delta), result, LARGEST=largest)
    return result


def _serving(*tensors: torch.Tensor) -> Any:
    return _code(tensors[0].device.type) if native.plain(*tensors) else None


def _launch(
    kernel: Any,
    shape: torch.Size,
    inputs: tuple[torch.Tensor, ...],
    *outputs: torch.Tensor,
    **constants: Any,
) -> None:
    """Launch `kernel` over all rows of `shape` [s, b, h, w].

    Args:
        kernel: Triton kernel of `rowwise_code`.
        shape: Shape of the largest tensor.
        inputs: Tensors that are passed with their strides.
        *outputs: Contiguous tensors, passed without strides.
        **constants: Compile-time constants of the kernel.
    """
    s, b, h, w = shape
    width = 1 << max(0, w - 1).bit_length()
    block = max(1, ELEMENTS // width)
    strides = [stride for x in inputs for stride in x.stride()[:3]]
    if s * b * h * w:
        with torch.cuda.device_of(inputs[0]):
            kernel[(-(-s * b * h // block),)](
                *inputs, *outputs, *strides, s * b * h, b, h, w, **constants, R=block, W=width
            )

"""The three matrix products of a tile, and in which dtype each is taken.

Decides the dtype of logits: on CUDA that of the operands, as tensor cores want it, with sums in
fp32. On CPU low-precision operands are widened, the weight by panels, and multiplied in fp32:
without AMX a bf16 product of torch runs at a fifth (or a hundredth) of the speed of an fp32 one.
The gradient of the weight always adds up in the accumulation dtype; on CUDA by one product that
adds to it, or, where torch is too old for that, by panels of a product that comes out in fp32.

Shape letters: n rows of a tile, d width, v vocabulary rows of this rank.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..kernels import torch_release
from ..kernels.online_softmax import accumulation_dtype

PANEL_BYTES = 1 << 23  # of widened weight
SUMMAND_BYTES = 1 << 28  # of a product that is added afterwards: enough rows to fill a GPU


def logits_dtype(operand: torch.Tensor) -> torch.dtype:
    """The dtype of a tile of logits, and of its gradient."""
    return operand.dtype if operand.is_cuda else accumulation_dtype(operand.dtype)


def logits_(z: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor) -> None:
    """z [n, v] = hidden [n, d] weight [v, d]^T; hidden in the dtype of z."""
    for rows, panel in _panels(weight, z.dtype):
        torch.mm(hidden, panel.t(), out=z[:, rows])


def input_gradient_(dh: torch.Tensor, z: torch.Tensor, weight: torch.Tensor) -> None:
    """dh [n, d] = z [n, v] weight [v, d]; dh in the dtype of z."""
    for rows, panel in _panels(weight, z.dtype):
        dh.addmm_(z[:, rows], panel, beta=0 if rows.start == 0 else 1)


def weight_gradient_(dw: torch.Tensor, z: torch.Tensor, hidden: torch.Tensor) -> None:
    """dw [v, d] += z [n, v]^T hidden [n, d]; dw in the accumulation dtype."""
    if dw.dtype == z.dtype:
        dw.addmm_(z.t(), hidden)
    elif torch_release.concerns(torch_release.WIDE_SUMS):  # CUDA, operands of low precision
        _add_by_panels(dw, z, hidden)
    else:  # the product comes out of the multiplier in fp32, onto what is there
        torch.addmm(dw, z.t(), hidden, out_dtype=dw.dtype, out=dw)  # pyright: ignore[reportCallIssue]


def _add_by_panels(dw: torch.Tensor, z: torch.Tensor, hidden: torch.Tensor) -> None:
    """As `weight_gradient_`, by products that are added in a second step."""
    count = min(len(dw), max(1, SUMMAND_BYTES // (dw.shape[1] * dw.itemsize)))
    buffer = torch.empty_like(dw[:count])
    for start in range(0, len(dw), count):
        rows = slice(start, start + count)
        part = buffer[: len(dw[rows])]
        torch.mm(z[:, rows].t(), hidden, out_dtype=dw.dtype, out=part)  # pyright: ignore[reportCallIssue]
        dw[rows] += part


def _panels(weight: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
    """The weight in `dtype`: whole if it is, else by panels of rows in one buffer."""
    if weight.dtype == dtype:
        yield slice(0, len(weight)), weight
        return
    count = min(len(weight), max(1, PANEL_BYTES // (weight.shape[1] * dtype.itemsize)))
    buffer = weight.new_empty((count, weight.shape[1]), dtype=dtype)
    for start in range(0, len(weight), count):
        rows = slice(start, min(start + count, len(weight)))
        panel = buffer[: rows.stop - rows.start]
        panel.copy_(weight[rows])
        yield rows, panel

# SPDX-License-Identifier: Apache-2.0
"""The protocol of flash attention operators, and torch's operator for CPUs.

`operators_cuda` has torch's operators for GPUs, `flash` the operators of FlashAttention packages.

Decides which widths and dtypes each serves, and spells the arguments of a tile as each operator
expects them. Windows are aligned to the last row and column, as in FlashAttention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from ..layout.sharding import to_device


class Lengths:
    """Rows and columns of each of many sequences, brought to each device once.

    sizes: (rows, columns) of each, one of which may be 0. idle: are there rows without columns?
    """

    def __init__(self, sizes: Sequence[tuple[int, int]] | np.ndarray):
        lengths = np.array(sizes, dtype=np.int32)
        rows, columns = lengths.max(axis=0).tolist()
        self._idle = np.repeat(lengths[:, 1] == 0, lengths[:, 0])  # bool [rows]
        self.idle = bool(self._idle.any())
        # Where the longest has one row FlashAttention 2 takes it that all have one.
        self.longest = (rows if lengths[:, 0].all() else max(rows, 2)), columns
        zero = np.zeros((1, 2), dtype=np.int32)
        self._ends = np.concatenate([zero, np.cumsum(lengths, axis=0, dtype=np.int32)])
        self._there: dict[torch.device, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Cumulative rows and columns, int32 [sequences + 1]; bool [rows]: has it no columns?"""
        if device not in self._there:
            ends = np.ascontiguousarray(self._ends.T).view(np.uint8).ravel()
            both = to_device(np.concatenate([ends, self._idle.view(np.uint8)]), device)
            bounds, idle = both.split([ends.size, self._idle.size])
            rows, columns = bounds.view(torch.int32).view(2, -1)
            self._there[device] = rows, columns, idle.view(torch.bool)
        return self._there[device]


aten = torch.ops.aten

Window = tuple[int, int]
Widths = tuple[int, int]  # of queries and keys, and of values
ONE_WIDTH = "takes keys and values of one width"  # and gets them padded


class Shown(NamedTuple):
    """Which columns each row sees in one call. Row m of s sees column n of t if causal (s = t):
    n <= m; with a bias: where it is not -inf; with a window (left, right): m + t - s - left <= n <=
    m + t - s + right; else always.

    lengths: of many sequences end to end in one batch entry, b = 1, of which each is as above.
    """

    causal: bool = False
    bias: torch.Tensor | None = None
    window: Window | None = None
    lengths: Lengths | None = None


class Operator(Protocol):
    """One stock operator pair on [b, h, s, d]; lse is [b, h, s].

    Of many sequences some may have no rows or no columns. Rows without columns get gradients 0, and
    any finite out and any lse; columns without rows get gradients 0.
    """

    device: str
    dtypes: tuple[torch.dtype, ...]
    multiple: int  # widths must be a multiple of this
    limits: tuple[int | None, int | None]  # of `masks.tiling.Cutter`; tables come as a bias
    windows: bool  # takes a window
    joins: bool  # takes many sequences of different lengths in one call
    deterministic: bool  # if torch.use_deterministic_algorithms asks for it
    takes_delta: bool  # backward gets delta [b, h, s] where others get out

    def unfit(self, device: torch.device, widths: Widths) -> str | None:
        """Why a device of the right type cannot serve widths of keys and of values, or None.
        Widths that differ are asked about first as they are, and then padded to the greater.
        """
        ...

    def forward(self, q, k, v, shown: Shown, scale: float) -> tuple[torch.Tensor, torch.Tensor]: ...

    def backward(
        self, dout, q, k, v, out, lse, shown: Shown, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


class CpuFlash:
    """torch's flash attention for CPUs."""

    device = "cpu"
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    multiple = 1
    limits: tuple[int | None, int | None] = (192, 256)  # it skips little of a triangle: cut it
    windows = False
    deterministic = True
    takes_delta = False
    joins = False

    def unfit(self, device: torch.device, widths: Widths) -> str | None:
        return None if widths[0] == widths[1] else ONE_WIDTH

    def forward(self, q, k, v, shown, scale):
        return aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, shown.causal, attn_mask=shown.bias, scale=scale
        )

    def backward(self, dout, q, k, v, out, lse, shown, scale):
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, shown.causal, attn_mask=shown.bias, scale=scale
        )

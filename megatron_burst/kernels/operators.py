# SPDX-License-Identifier: Apache-2.0
"""Interface of flash attention operators, and torch's operator for CPUs.

`operators_cuda` has torch's operators for GPUs, and `flash` has the operators of FlashAttention
packages. Each operator class defines the supported widths and dtypes, and converts a tile to
operator arguments. Windows are aligned to the last row and column, as in FlashAttention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from ..layout.sharding import to_device

if TYPE_CHECKING:
    from .block_lists import PairBlocks


class Lengths:
    """Numbers of rows and columns of the sequences of one call, copied to each device once.

    Args:
        sizes: (rows, columns) of each sequence; one of the two numbers may be 0.

    Attributes:
        sizes: int32 [n, 2], rows and columns of each sequence.
        idle: True if a sequence has rows but no columns.
        longest: Maximum number of rows, and maximum number of columns.
        total: Number of rows to which the operator pads its tensors. The tensors are then whole
            shards. None if the tensors contain only the rows of the sequences.
    """

    total: int | None = None

    def __init__(self, sizes: Sequence[tuple[int, int]] | np.ndarray):
        self.sizes = lengths = np.array(sizes, dtype=np.int32)
        rows, columns = lengths.max(axis=0).tolist()
        self._idle = np.repeat(lengths[:, 1] == 0, lengths[:, 0])  # bool [rows]
        self.idle = bool(self._idle.any())
        # If the maximum is one row, FlashAttention 2 assumes that every sequence has exactly one
        # row.
        self.longest = (rows if lengths[:, 0].all() else max(rows, 2)), columns
        zero = np.zeros((1, 2), dtype=np.int32)
        self._ends = np.concatenate([zero, np.cumsum(lengths, axis=0, dtype=np.int32)])
        self._by_device: dict[torch.device, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def fit(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
        """Return True if one call can compute the sequences of these tensors [b, heads, s, d]."""
        return len(q) == 1

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the lengths as tensors on `device`, for the arguments of operators.

        Returns:
            Cumulative rows (int32 [n + 1] for n sequences), cumulative columns (int32 [n + 1]), and
            a bool per row that is True if the row's sequence has no columns.
        """
        if device not in self._by_device:
            count = len(self._ends)
            padded = np.zeros((2, -(-count // 4) * 4), dtype=np.int32)  # both are 16-byte aligned
            padded[:, :count] = self._ends.T
            ends = padded.view(np.uint8).ravel()
            packed = to_device(np.concatenate([ends, self._idle.view(np.uint8)]), device)
            bounds, idle = packed.split([ends.size, self._idle.size])
            rows, columns = bounds.view(torch.int32).view(2, -1)[:, :count]
            self._by_device[device] = rows, columns, idle.view(torch.bool)
        return self._by_device[device]


aten = torch.ops.aten

Window = tuple[int, int]
Widths = tuple[int, int]  # of queries and keys, and of values
ONE_WIDTH = "requires equal widths of keys and values"  # the caller then pads them


class TileVisibility(NamedTuple):
    """The columns that each row sees in one operator call with s rows and t columns.

    Row m sees column n if all set fields allow it. `causal` (s = t) allows n <= m. `bias` allows
    entries that are not -inf. `window` allows m + t - s - left <= n <= m + t - s + right.

    Attributes:
        causal: True for a causal square tile.
        bias: [s, t], added to the scores, or None.
        window: (left, right), or None.
        lengths: Rows and columns of many sequences that are concatenated in one batch entry (b =
            1). The rules above hold for each sequence.
        blocks: Lists of visible blocks, for any mask, or None. The other fields are then not set.
    """

    causal: bool = False
    bias: torch.Tensor | None = None
    window: Window | None = None
    lengths: Lengths | None = None
    blocks: PairBlocks | None = None


class Operator(Protocol):
    """A flash attention operator: forward and backward on tensors [b, h, s, d] with lse [b, h, s].

    One call may compute many sequences, and some of them may have no rows or no columns. Rows
    without columns get gradients 0, an arbitrary finite out and an arbitrary lse. Columns without
    rows get gradients 0.

    Attributes:
        device: Device type, such as "cpu".
        dtypes: Supported dtypes.
        multiple: Widths must be a multiple of this number.
        limits: Arguments of `masks.tiling.Cutter` that limit the sizes of tiles. Tables of visible
            pairs are passed as a bias.
        windows: True if the operator supports a window.
        joins: True if the operator computes many sequences of different lengths in one call.
        rounds: True if the operator compiles for every shape, so that calls with many sequences may
            have only a few shapes (`rounded`).
        deterministic: True if results are reproducible with torch.use_deterministic_algorithms.
        takes_delta: True if the argument `out` of backward is delta [b, h, s].
    """

    device: str
    dtypes: tuple[torch.dtype, ...]
    multiple: int
    limits: tuple[int | None, int | None]
    windows: bool
    rounds: bool
    deterministic: bool
    takes_delta: bool

    @property
    def joins(self) -> bool: ...

    def unfit(self, device: torch.device, widths: Widths) -> str | None:
        """Return why these widths of keys and values are not supported; None if they are.

        If different widths are unsupported, the caller pads both to the larger one and checks
        again.
        """
        ...

    def forward(
        self, q, k, v, visibility: TileVisibility, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def backward(
        self, dout, q, k, v, out, lse, visibility: TileVisibility, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


class CpuFlash:
    """Operator for CPUs: torch's flash attention."""

    device = "cpu"
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    multiple = 1
    limits: tuple[int | None, int | None] = (192, 256)  # large triangles compute hidden pairs
    windows = False
    deterministic = True
    takes_delta = False
    joins = rounds = False

    def unfit(self, device: torch.device, widths: Widths) -> str | None:
        return None if widths[0] == widths[1] else ONE_WIDTH

    def forward(self, q, k, v, visibility, scale):
        return aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, visibility.causal, attn_mask=visibility.bias, scale=scale
        )

    def backward(self, dout, q, k, v, out, lse, visibility, scale):
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, visibility.causal, attn_mask=visibility.bias, scale=scale
        )

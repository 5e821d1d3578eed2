# SPDX-License-Identifier: Apache-2.0
"""torch's attention operators for CUDA: FlashAttention 2 and cuDNN.

Each operator class defines the supported widths and devices, and converts a tile, or many
sequences, to operator arguments. The module is imported only if tensors are on a GPU.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .operators import ONE_WIDTH, Lengths, TileVisibility, Widths
from .rounded import SMALLEST

aten = torch.ops.aten

CUDNN_FIRST = (9, 0), (10, 0), (10, 3)  # compute capabilities on which torch prefers cuDNN
EMPTY_SEQUENCES = 92500  # first cuDNN version in which sequences may have no rows or columns


class CudaFlash:
    """Operator for CUDA: FlashAttention 2, as part of torch."""

    device = "cuda"
    dtypes = (torch.bfloat16, torch.float16)
    multiple = 8
    limits: tuple[int | None, int | None] = (None, None)
    windows = True
    deterministic = True
    takes_delta = False
    joins, rounds = True, False

    def unfit(self, device: torch.device, widths: Widths) -> str | None:
        if max(widths) > 256:
            return f"supports widths up to 256, got {max(widths)}"
        return None if widths[0] == widths[1] else ONE_WIDTH

    def forward(self, q, k, v, visibility, scale):
        q, k, v = (rows_first(x, visibility.lengths) for x in (q, k, v))
        out, lse, *_ = aten._flash_attention_forward(
            q, k, v, *_lengths(q, k, visibility), 0.0, visibility.causal, False, scale=scale,
            **_sides(visibility),
        )  # fmt: skip
        return heads_first(out), lse if lse.dim() == 3 else lse.unsqueeze(0)

    def backward(self, dout, q, k, v, out, lse, visibility, scale):
        dout, q, k, v, out = (rows_first(x, visibility.lengths) for x in (dout, q, k, v, out))
        grads = aten._flash_attention_backward(
            dout, q, k, v, out, stats_of(lse, visibility.lengths), *_lengths(q, k, visibility), 0.0,
            visibility.causal, *_no_dropout(q.device), scale=scale, **_sides(visibility),
        )  # fmt: skip
        dq, dk, dv = (heads_first(grad) for grad in grads)
        return dq, dk, dv


class Graph(NamedTuple):
    """Key under which torch caches a graph that cuDNN has compiled.

    Calls with different `Lengths` share a graph if they have the same number of sequences and the
    same largest lengths.

    Attributes:
        backward: True for the graph of backward.
        causal: True for a causal mask.
        shapes: Shapes of q, k and v as the operator gets them.
        strides: Strides of q, k and v.
        sequences: Number of sequences, or None.
        longest: Maximum number of rows and of columns, or None.
    """

    backward: bool
    causal: bool
    shapes: tuple[torch.Size, ...]
    strides: tuple[tuple[int, ...], ...]
    sequences: int | None = None
    longest: tuple[int, int] | None = None


class CudaCudnn:
    """Operator for CUDA: cuDNN's attention, as part of torch.

    Many sequences in one call are passed as in FlashAttention: tensors [s, h, d], cumulative
    lengths, lse [h, s] in natural logarithm. The causal mask begins at the first row and column of
    each sequence. These calls never ran on a GPU.

    Args:
        device: Device of the tensors. None: every sequence is a separate call.

    Attributes:
        separate: Why sequences of different lengths need separate calls; None if they do not.
        graphs: Keys of the graphs that calls of this operator needed.
    """

    device = "cuda"
    dtypes = (torch.bfloat16, torch.float16)
    multiple = 8
    limits: tuple[int | None, int | None] = (None, None)
    windows = False
    deterministic = False  # backward adds to dq in any order
    takes_delta = False
    rounds = True

    def __init__(self, device: torch.device | None = None):
        self.separate = "no device" if device is None else _no_sequences(device)
        self.graphs: set[Graph] = set()

    @property
    def joins(self) -> bool:
        return self.separate is None

    def unfit(self, device: torch.device, widths: Widths) -> str | None:
        """Return why these widths of keys and values are not supported; None if they are.

        These limits hold for backward in all supported releases of torch: the widths (192, 128) of
        MLA need cuDNN 9.11 or newer, and width 256 needs Hopper with cuDNN 9.10 or newer.
        """
        if max(widths) <= 128:
            return None
        version = torch.backends.cudnn.version() or 0
        device_is = torch.cuda.get_device_capability(device)
        if widths == (192, 128) and version >= 91100 and device_is in CUDNN_FIRST:
            return None
        if widths == (256, 256) and version >= 91000 and device_is == (9, 0):
            return None
        return (
            "supports widths of (keys, values) up to 128; also (192, 128) with cuDNN 9.11 on "
            f"Hopper and Blackwell, and (256, 256) with cuDNN 9.10 on Hopper; got {widths}"
        )

    @functools.cached_property
    def stats_end(self) -> torch.Size:
        """Return the dimensions after [b, h, s] of cuDNN's lse: (1,) since torch 2.9, else ()."""
        x = torch.empty(1, 1, 8, 8, dtype=torch.bfloat16, device="meta")
        return aten._scaled_dot_product_cudnn_attention(x, x, x, None, True, 0.0, True)[1].shape[3:]

    def forward(self, q, k, v, visibility, scale):
        causal, lengths, s = visibility.causal, visibility.lengths, q.shape[2]
        if lengths is None:
            self._note(False, causal, q, k, v)
            result = aten._scaled_dot_product_cudnn_attention(
                q, k, v, None, True, 0.0, causal, scale=scale
            )
            return result[0], result[1].reshape(q.shape[:3])
        q, k, v = (_sequences(x, lengths) for x in (q, k, v))
        rows, columns, *longest = _cudnn_lengths(q.device, lengths)
        self._note(False, causal, q, k, v, rows.numel() - 1, longest)
        out, lse, *_ = aten._cudnn_attention_forward(
            q, k, v, None, rows, columns, *longest, True, 0.0, causal, False, scale=scale
        )
        assert lse.shape == (q.shape[1], q.shape[0])  # torch before 2.14 has another order
        return heads_first(out[:s]), lse[:, :s].unsqueeze(0)

    def backward(self, dout, q, k, v, out, lse, visibility, scale):
        causal, lengths, s, t = visibility.causal, visibility.lengths, q.shape[2], k.shape[2]
        # Some releases of torch cache a graph by q, k and v only. A cached graph assumes the
        # strides of out and dout in the first call, so these strides must never change.
        dout, out = (_dense(x) for x in (dout, out))
        seed = torch.empty((), dtype=torch.int64, device=q.device)  # never read: no dropout
        if lengths is None:
            self._note(True, causal, q, k, v)
            # One row is contiguous with any strides, but cuDNN requires a last stride of 1.
            stats = lse.clone(memory_format=torch.contiguous_format)
            stats = stats.view(*lse.shape, *self.stats_end)
            return aten._scaled_dot_product_cudnn_attention_backward(
                dout, q, k, v, out, stats, seed, seed, None, None, None, s, t, 0.0, causal,
                scale=scale,
            )  # fmt: skip
        dout, q, k, v, out = (_sequences(x, lengths) for x in (dout, q, k, v, out))
        stats = lse.squeeze(0).contiguous()
        if stats.shape[1] < q.shape[0]:
            stats = F.pad(stats, (0, q.shape[0] - stats.shape[1]))
        rows, columns, *longest = _cudnn_lengths(q.device, lengths)
        self._note(True, causal, q, k, v, rows.numel() - 1, longest)
        grads = aten._cudnn_attention_backward(
            dout, q, k, v, out, stats, seed, seed, None, rows, columns, *longest, 0.0, causal,
            scale=scale,
        )  # fmt: skip
        dq, dk, dv = (heads_first(grad[:n]) for grad, n in zip(grads, (s, t, t), strict=True))
        return dq, dk, dv

    def _note(self, backward, causal, q, k, v, sequences=None, longest=None) -> None:
        """Add the key of the graph that a call needs to `graphs`."""
        shapes, strides = zip(*((x.shape, x.stride()) for x in (q, k, v)), strict=True)
        longest = None if longest is None else tuple(longest)
        self.graphs.add(Graph(backward, causal, shapes, strides, sequences, longest))


def _no_sequences(device: torch.device) -> str | None:
    """Return why one call of cuDNN cannot compute many sequences; None if it can.

    According to torch's sources and cuDNN's tests, torch before 2.14 compiles a graph in every such
    call, and cuDNN before 9.25 returns NaN if a sequence has no columns. torch 2.14 is recognised
    by the operator argument `seqused_k`. cuDNN's backward supports such calls on Hopper and
    Blackwell.
    """
    operator = getattr(aten, "_cudnn_attention_forward", None)
    names = () if operator is None else (x.name for x in operator.default._schema.arguments)
    if "seqused_k" not in names:
        return f"requires torch 2.14 or newer, got {torch.__version__}"
    if device.type != "cuda":
        return f"requires a GPU, got {device.type}"
    version = torch.backends.cudnn.version() or 0
    if version < EMPTY_SEQUENCES:
        return f"requires cuDNN 9.25 or newer, got {version // 10000}.{version // 100 % 100}"
    capability = torch.cuda.get_device_capability(device)
    if capability not in CUDNN_FIRST:
        return f"requires Hopper or Blackwell, got compute capability {capability}"
    return None


def _sequences(x: torch.Tensor, lengths: Lengths) -> torch.Tensor:
    """Return x [1, h, s, d] as [s, h, d], padded with zeros to `lengths.total` rows."""
    x = rows_first(x, lengths)
    missing = 0 if lengths.total is None else lengths.total - x.shape[0]
    return F.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x


def _cudnn_lengths(
    device: torch.device, lengths: Lengths
) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Return cumulative rows, cumulative columns, and maximum rows and columns of a sequence.

    Both maxima are at least 256, because torch refuses 128 and less.
    """
    rows, columns, _ = lengths.on(device)
    most_rows, most_columns = (max(n, SMALLEST) for n in lengths.longest)
    return rows, columns, most_rows, most_columns


def prefers_cudnn(device: torch.device) -> bool:
    """Return True if torch prefers its cuDNN operator to FlashAttention 2 on this device.

    The rule is copied from torch: Hopper or Blackwell, and cuDNN newer than 9.15.0. Older versions
    have an error for sequence lengths that are not a multiple of 128.
    """
    capability = torch.cuda.get_device_capability(device)
    version = torch.backends.cudnn.version() or 0
    return capability in CUDNN_FIRST and version > 91500


def _dense(x: torch.Tensor) -> torch.Tensor:
    """Return x [b, h, s, d], or a copy if its memory is not dense in the order [s, b, h, d]."""
    b, h, _, d = x.shape
    strides = (h * d, d, b * h * d, 1)
    if x.stride() == strides:
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def rows_first(x: torch.Tensor, lengths: Lengths | None) -> torch.Tensor:
    """Return x [b, h, s, d] as a view [b, s, h, d], or [s, h, d] with `lengths` (then b = 1)."""
    x = x.transpose(1, 2)
    return x if lengths is None else x.squeeze(0)


def heads_first(x: torch.Tensor) -> torch.Tensor:
    """Return x [b, s, h, d] or [s, h, d] as a view [b, h, s, d]: the inverse of `rows_first`."""
    return (x if x.dim() == 4 else x.unsqueeze(0)).transpose(1, 2)


def stats_of(x: torch.Tensor, lengths: Lengths | None) -> torch.Tensor:
    """Return x (lse or delta [b, h, s]) as a contiguous tensor, without b if `lengths` is given."""
    return (x if lengths is None else x.squeeze(0)).contiguous()


def _lengths(q: torch.Tensor, k: torch.Tensor, visibility: TileVisibility) -> tuple:
    """Return cumulative rows, cumulative columns, and maximum rows and columns of a sequence.

    Without sequences, the cumulative numbers are None. q and k are results of `rows_first`.
    """
    if visibility.lengths is None:
        return None, None, q.shape[1], k.shape[1]
    rows, columns, _ = visibility.lengths.on(q.device)
    return rows, columns, *visibility.lengths.longest


def _no_dropout(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return seed and offset, which the operators require but do not read without dropout."""
    seed = torch.empty(2, dtype=torch.uint64, device=device)
    return seed, torch.empty((), dtype=torch.uint64, device=device)


def _sides(visibility: TileVisibility) -> dict[str, int]:
    if visibility.window is None:
        return {}
    return {"window_size_left": visibility.window[0], "window_size_right": visibility.window[1]}

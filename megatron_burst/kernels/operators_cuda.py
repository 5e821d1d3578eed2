# SPDX-License-Identifier: Apache-2.0
"""torch's attention operators for CUDA: FlashAttention 2 and cuDNN.

Each operator class defines the supported widths and devices, and converts a tile, or many
sequences, to operator arguments. The module is imported only if tensors are on a GPU.
"""

from __future__ import annotations

import functools

import torch

from .operators import ONE_WIDTH, Lengths, TileVisibility, Widths

aten = torch.ops.aten

CUDNN_FIRST = (9, 0), (10, 0), (10, 3)  # compute capabilities on which torch prefers cuDNN


class CudaFlash:
    """Operator for CUDA: FlashAttention 2, as part of torch."""

    device = "cuda"
    dtypes = (torch.bfloat16, torch.float16)
    multiple = 8
    limits: tuple[int | None, int | None] = (None, None)
    windows = True
    deterministic = True
    takes_delta = False
    joins = True

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


class CudaCudnn:
    """Operator for CUDA: cuDNN's attention, as part of torch."""

    device = "cuda"
    dtypes = (torch.bfloat16, torch.float16)
    multiple = 8
    limits: tuple[int | None, int | None] = (None, None)
    windows = False
    deterministic = False  # backward adds to dq in any order
    takes_delta = False
    joins = False

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
        result = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, visibility.causal, scale=scale
        )
        return result[0], result[1].reshape(q.shape[:3])

    def backward(self, dout, q, k, v, out, lse, visibility, scale):
        # Some releases of torch cache a graph by q, k and v only. A cached graph assumes the
        # strides of out and dout in the first call, so these strides must never change.
        dout, out = (_dense(x) for x in (dout, out))
        seed = torch.empty((), dtype=torch.int64, device=q.device)  # never read: no dropout
        sizes = (None, None, q.shape[2], k.shape[2])
        # One row is contiguous with any strides, but cuDNN requires a last stride of 1.
        stats = lse.clone(memory_format=torch.contiguous_format)
        stats = stats.view(*lse.shape, *self.stats_end)
        return aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, stats, seed, seed, None, *sizes, 0.0, visibility.causal, scale=scale
        )


def prefers_cudnn(device: torch.device) -> bool:
    """Return True if torch prefers its cuDNN operator to FlashAttention 2 on this device.

    The rule is copied from torch: Hopper or Blackwell, and cuDNN newer than 9.15.0. Older versions
    have an error for sequence lengths that are not a multiple of 128.
    """
    capability = torch.cuda.get_device_capability(device)
    version = torch.backends.cudnn.version() or 0
    return capability in CUDNN_FIRST and version > 91500


def _dense(x: torch.Tensor) -> torch.Tensor:
    """Return x [b, h, s, d] as it is if its memory is dense as [s, b, h, d]; else a dense copy."""
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
    """Return x, lse or delta [b, h, s], contiguous for FlashAttention; [h, s] with `lengths`."""
    return (x if lengths is None else x.squeeze(0)).contiguous()


def _lengths(q: torch.Tensor, k: torch.Tensor, visibility: TileVisibility) -> tuple:
    """Return cumulative rows, cumulative columns, most rows and most columns of the sequences.

    Without sequences, the cumulative counts are None. q and k are `rows_first`.
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

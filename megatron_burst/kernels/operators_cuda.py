# SPDX-License-Identifier: Apache-2.0
"""torch's attention operators for CUDA: FlashAttention 2 and cuDNN, as torch contains them.

Decides which widths and devices each serves, and spells the arguments of a tile, or of many
sequences, as it expects them. Imported where tensors are on a GPU.
"""

from __future__ import annotations

import functools

import torch

from .operators import ONE_WIDTH, Lengths, Shown, Widths

aten = torch.ops.aten

CUDNN_FIRST = (9, 0), (10, 0), (10, 3)  # compute capabilities where torch asks cuDNN first


class CudaFlash:
    """FlashAttention 2, as torch contains it."""

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
            return f"takes widths up to 256, got {max(widths)}"
        return None if widths[0] == widths[1] else ONE_WIDTH

    def forward(self, q, k, v, shown, scale):
        q, k, v = (rows_first(x, shown.lengths) for x in (q, k, v))
        out, lse, *_ = aten._flash_attention_forward(
            q, k, v, *_lengths(q, k, shown), 0.0, shown.causal, False, scale=scale, **_sides(shown)
        )
        return heads_first(out), lse if lse.dim() == 3 else lse.unsqueeze(0)

    def backward(self, dout, q, k, v, out, lse, shown, scale):
        dout, q, k, v, out = (rows_first(x, shown.lengths) for x in (dout, q, k, v, out))
        grads = aten._flash_attention_backward(
            dout, q, k, v, out, stats_of(lse, shown.lengths), *_lengths(q, k, shown), 0.0,
            shown.causal, *_no_dropout(q.device), scale=scale, **_sides(shown),
        )  # fmt: skip
        dq, dk, dv = (heads_first(grad) for grad in grads)
        return dq, dk, dv


class CudaCudnn:
    """cuDNN's attention, as torch contains it."""

    device = "cuda"
    dtypes = (torch.bfloat16, torch.float16)
    multiple = 8
    limits: tuple[int | None, int | None] = (None, None)
    windows = False
    deterministic = False  # its backward adds to dq in any order
    takes_delta = False
    joins = False

    def unfit(self, device: torch.device, widths: Widths) -> str | None:
        """As releases of torch have it for their own use of cuDNN, where they agree about
        backward: from 9.11 on (192, 128), MLA's; from 9.10 on 256 on Hopper.
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
            "takes widths up to 128, on Hopper and Blackwell with cuDNN 9.11 (192, 128), and on "
            f"Hopper with cuDNN 9.10 (256, 256), got {widths}"
        )

    @functools.cached_property
    def stats_end(self) -> torch.Size:
        """What follows [b, h, s] in the shape of cuDNN's statistics: 1 from torch 2.9 on."""
        x = torch.empty(1, 1, 8, 8, dtype=torch.bfloat16, device="meta")
        return aten._scaled_dot_product_cudnn_attention(x, x, x, None, True, 0.0, True)[1].shape[3:]

    def forward(self, q, k, v, shown, scale):
        result = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, shown.causal, scale=scale
        )
        return result[0], result[1].reshape(q.shape[:3])

    def backward(self, dout, q, k, v, out, lse, shown, scale):
        # Some releases of torch find a graph that they have built by q, k and v alone, and build it
        # for the strides that out and dout have the first time: so these are always the same.
        dout, out = (_dense(x) for x in (dout, out))
        seed = torch.empty((), dtype=torch.int64, device=q.device)  # no dropout: never read
        sizes = (None, None, q.shape[2], k.shape[2])
        # Of one row any strides count as contiguous, and cuDNN wants a last one of 1.
        stats = lse.clone(memory_format=torch.contiguous_format)
        stats = stats.view(*lse.shape, *self.stats_end)
        return aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, stats, seed, seed, None, *sizes, 0.0, shown.causal, scale=scale
        )


def prefers_cudnn(device: torch.device) -> bool:
    """Is cuDNN the faster of torch's operators here? torch's own rule for its own choice: Hopper
    and Blackwell, and a cuDNN later than 9.15.0, which cured lengths that 128 does not divide.
    """
    capability = torch.cuda.get_device_capability(device)
    version = torch.backends.cudnn.version() or 0
    return capability in CUDNN_FIRST and version > 91500


def _dense(x: torch.Tensor) -> torch.Tensor:
    """X [b, h, s, d], copied where it is not dense as [s, b, h, d]."""
    b, h, _, d = x.shape
    strides = (h * d, d, b * h * d, 1)
    if x.stride() == strides:
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def rows_first(x: torch.Tensor, lengths: Lengths | None) -> torch.Tensor:
    """[b, h, s, d] -> [b, s, h, d], and [s, h, d] of many sequences end to end; a view."""
    x = x.transpose(1, 2)
    return x if lengths is None else x.squeeze(0)


def heads_first(x: torch.Tensor) -> torch.Tensor:
    """`rows_first` undone."""
    return (x if x.dim() == 4 else x.unsqueeze(0)).transpose(1, 2)


def stats_of(x: torch.Tensor, lengths: Lengths | None) -> torch.Tensor:
    """Lse or delta [b, h, s] as FlashAttention wants it: dense, and [h, s] of many sequences."""
    return (x if lengths is None else x.squeeze(0)).contiguous()


def _lengths(q: torch.Tensor, k: torch.Tensor, shown: Shown) -> tuple:
    """Where sequences begin and how long they are, as torch's flash attention takes it."""
    if shown.lengths is None:
        return None, None, q.shape[1], k.shape[1]
    rows, columns, _ = shown.lengths.on(q.device)
    return rows, columns, *shown.lengths.longest


def _no_dropout(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Seed and offset, which are never read."""
    seed = torch.empty(2, dtype=torch.uint64, device=device)
    return seed, torch.empty((), dtype=torch.uint64, device=device)


def _sides(shown: Shown) -> dict[str, int]:
    if shown.window is None:
        return {}
    return {"window_size_left": shown.window[0], "window_size_right": shown.window[1]}

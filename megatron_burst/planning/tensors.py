"""Checks of the tensors of a call: those that are needed for a plan, and those that come later.

Reads shapes, dtypes and devices alone.

Shape letters: s local rows, b batch, h query heads, k key/value heads, d width, w value width.
"""

from __future__ import annotations

import torch

from ..kernels.online_softmax import accumulation_dtype

Signature = tuple[tuple[tuple[int, ...], torch.dtype, str], ...]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def signature(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Signature:
    """What of the tensors a plan depends on: shape, dtype and device of each."""
    return tuple(map(_described, (q, k, v)))


def _described(t: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype, str]:
    return tuple(t.shape), t.dtype, str(t.device)


def check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise ValueError unless these are tensors that belong together."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if isinstance(tensor, (list, tuple)):
            raise ValueError(
                f"{name} must be one tensor, the shard of this rank, got a list of {len(tensor)}; "
                "lists are for mb.Groups.in_process"
            )
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            raise ValueError(f"{name} must be a tensor, and not sparse, got {tensor!r:.100}")
        if tensor.dim() != 4 or 0 in tensor.shape:
            raise ValueError(f"{name} must be [s, b, heads, width], got {tuple(tensor.shape)}")
        if tensor.dtype not in DTYPES or tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(
                f"{name}: q, k, v must share a floating dtype of {DTYPES} and a device, got "
                f"{tensor.dtype} on {tensor.device} beside {q.dtype} on {q.device}"
            )
    if k.shape[:2] != q.shape[:2] or v.shape[:2] != q.shape[:2] or v.shape[2] != k.shape[2]:
        raise ValueError(
            "q, k, v must share s and b, and k, v their heads, got "
            f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"k: width must be that of q, {q.shape[3]}, got {k.shape[3]}")
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"k: the number of key/value heads must divide the {q.shape[2]} query heads, "
            f"got {k.shape[2]}"
        )


def check_keys(k: torch.Tensor, v: torch.Tensor, made_for: Signature) -> None:
    """Raise ValueError unless k and v are those that a plan was `made_for`."""
    for name, tensor, wanted in zip("kv", (k, v), made_for[1:], strict=True):
        found = isinstance(tensor, torch.Tensor) and _described(tensor)
        if found != wanted:
            raise ValueError(
                f"{name}: the plan was made for {wanted}, got {found or tensor!r:.100}"
            )


def check_sink(sink: torch.Tensor | None, q: torch.Tensor) -> None:
    """Raise ValueError unless `sink` is None or a logit for each head of q."""
    if sink is None:
        return
    tensor = isinstance(sink, torch.Tensor)
    wanted = (q.shape[2],), q.device
    if not tensor or not sink.is_floating_point() or (sink.shape, sink.device) != wanted:
        got = f"{sink.dtype} {tuple(sink.shape)} on {sink.device}" if tensor else repr(sink)
        raise ValueError(
            f"sink must be a floating tensor [{q.shape[2]}], one logit per query head, on "
            f"{q.device}, got {got}"
        )


def check_max_logits(max_logits: torch.Tensor | None, q: torch.Tensor) -> None:
    """Raise ValueError unless `max_logits` is None or has a place for each head of q."""
    if max_logits is None:
        return
    wanted, got = (accumulation_dtype(q.dtype), (q.shape[2],), q.device), f"{max_logits!r:.100}"
    if isinstance(max_logits, torch.Tensor) and not max_logits.requires_grad:
        found = max_logits.dtype, tuple(max_logits.shape), max_logits.device
        if found == wanted and max_logits.is_contiguous():  # kernels write to head after head
            return
        strides = "" if max_logits.is_contiguous() else f" with strides {max_logits.stride()}"
        got = "{} {} on {}".format(*found) + strides
    raise ValueError(
        f"max_logits must be a contiguous {wanted[0]} tensor [{q.shape[2]}], one place per query "
        f"head, on {q.device} and without a gradient, got {got}"
    )

"""Checks of what all operations on chains take: groups, layout, documents, algorithm, tensors.

Reads shapes, dtypes and devices alone; must not communicate, so that every rank reaches the
comparison of arguments.
"""

from __future__ import annotations

from typing import Any

import torch

from ..comm.groups import Groups
from ..layout import LAYOUTS, Layout, document_bounds, make
from ..schedule.scans import SCANS
from .tables import Sequence

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ALGORITHMS = ("auto", *SCANS)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which states travel: float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_tensor(name: str, tensor: Any, shapes: dict[str, tuple[int | None, ...]]) -> None:
    """Raise ValueError unless `tensor` is floating, dense, not empty and has one of `shapes`:
    letters -> sizes, None for any."""
    words = " or ".join(f"[{letters}]" for letters in shapes)
    if isinstance(tensor, (list, tuple)):
        raise ValueError(
            f"{name} must be one tensor, that of this rank, got a list of {len(tensor)}; lists are "
            "for mb.Groups.in_process"
        )
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        raise ValueError(f"{name} must be a tensor {words}, and not sparse, got {tensor!r:.100}")
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{name} must have one of the dtypes {DTYPES}, got {tensor.dtype}")
    found = tuple(tensor.shape)
    for sizes in shapes.values():
        if len(sizes) == len(found) and all(
            size > 0 if wanted is None else size == wanted
            for size, wanted in zip(found, sizes, strict=True)
        ):
            return
    wanted = " or ".join(
        str([("any" if size is None else size) for size in sizes]) for sizes in shapes.values()
    )
    raise ValueError(f"{name} must be {words}, here {wanted}, got {list(found)}")


def check_together(tensors: dict[str, torch.Tensor], dtype: bool) -> None:
    """Raise ValueError unless all are on the device of the first, and of its dtype if `dtype`."""
    (name, first), *others = tensors.items()
    for other, tensor in others:
        if tensor.device != first.device or (dtype and tensor.dtype != first.dtype):
            raise ValueError(
                f"{other}: must be on the device{' and of the dtype' * dtype} of {name}, "
                f"{first.dtype} on {first.device}, got {tensor.dtype} on {tensor.device}"
            )


def check_name(name: str, value: object, names: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of them."""
    if not isinstance(value, str) or value not in names:
        raise ValueError(f"{name} must be one of {', '.join(names)}, got {value!r}")


def check_final(value: object) -> None:
    """Raise ValueError unless `return_final_state` is a truth value."""
    if not isinstance(value, bool):
        raise ValueError(f"return_final_state must be True or False, got {value!r:.100}")


def check_device(groups: Groups, name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless the groups move tensors of this kind of device."""
    moved, kind = groups.devices, tensor.device.type
    if groups.size > 1 and moved and kind not in moved:
        needed = {"cpu": "gloo", "cuda": "nccl"}.get(kind)
        raise ValueError(
            f"groups: backend {groups.backend} moves {' and '.join(moved)} tensors, got {name} on "
            f"{kind}; "
            + (f"make the process group with backend {needed}" if needed else "move it there")
        )


def check_rates(rates: Any) -> None:
    """Raise ValueError unless it is None or states the rates of links, as `mb.Rates` does."""
    if rates is None:
        return
    for name, least in (("intra", "positive"), ("inter", "positive"), ("latency", "0 or more"),
                        ("posting", "0 or more")):  # fmt: skip
        value: Any = getattr(rates, name, None)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or value < 0 or (least == "positive" and not value):
            raise ValueError(
                f"rates: give mb.Rates, whose {name} is a number, {least}; got {rates!r}"
            )


def sequence_of(groups: Groups, layout: object, seq_len: int, cu_seqlens: Any) -> Sequence:
    """The layout, the length and the documents; ValueError where they do not fit one another."""
    bounds = None if cu_seqlens is None else document_bounds(cu_seqlens)
    if bounds is not None and bounds[-1] != seq_len:
        raise ValueError(
            f"cu_seqlens: the documents end at {bounds[-1]}, and the {groups.size} ranks hold "
            f"{seq_len} positions"
        )
    if not isinstance(layout, (str, Layout)):
        raise ValueError(f"layout must be a name or one of mb.layout, got {layout!r}")
    if isinstance(layout, str):
        names = (*LAYOUTS, "balanced")
        if layout not in names:
            raise ValueError(
                f"layout must be one of {', '.join(sorted(names))}, or made by mb.layout.make, "
                f"got {layout!r}"
            )
        more: dict[str, Any] = {}
        if layout == "balanced":
            more = {"cu_seqlens": cu_seqlens, "per_node": groups.topology.per_node}
        layout = make(layout, cp_size=groups.size, **more)
    if layout.cp_size != groups.size:
        raise ValueError(f"layout is for {layout.cp_size} ranks, groups have {groups.size}")
    layout.check(seq_len)
    return Sequence(layout, seq_len, None if bounds is None else tuple(bounds.tolist()))


def check_initial(
    initial: Any, documents: int, shape: tuple[int, ...], device: torch.device
) -> None:
    """Raise ValueError unless it is None or a state [b, h, d, w] for each document."""
    if initial is None:
        return
    check_tensor("initial_state", initial, {"documents, b, h, d, w": (documents, *shape)})
    if initial.device != device:
        raise ValueError(f"initial_state: must be on {device}, got {initial.device}")

# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of one rank, for all operations on chains.

A chain is all pieces of a document in order; a piece is a run of consecutive positions on one rank.
This module also collects the values that all ranks then compare (`facts`). It reads only shapes,
dtypes and devices. It must not communicate, so that every rank reaches the comparison.

Shape letters: s local rows, b batch, g query/key heads, h value heads, d width of keys, w width of
values, p pieces of this rank, c channels.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ..comm.consensus import Facts
from ..comm.groups import Groups
from ..layout import LAYOUTS, Layout, document_bounds, make
from ..layout.layouts import tree_mask
from ..schedule.scans import SCANS
from .forms import Form
from .program import PackedSequence, Reverse, States, chains_of

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ALGORITHMS = ("auto", *SCANS)
OVER_TREES = ("auto", "all_gather")  # other algorithms support only one successor per piece


def check_tensor(name: str, tensor: Any, shapes: dict[str, tuple[int | None, ...]]) -> None:
    """Raise ValueError unless a tensor is floating-point, dense, not empty and has one of `shapes`.

    Args:
        name: Name of the tensor, for messages.
        tensor: Tensor to check.
        shapes: Allowed shapes: letters of the dimensions -> sizes. A size of None allows any size.
    """
    words = " or ".join(f"[{letters}]" for letters in shapes)
    if isinstance(tensor, (list, tuple)):
        raise ValueError(
            f"{name} must be one tensor, the shard of this rank, got a list of {len(tensor)}; call "
            "the operation once on each rank"
        )
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        raise ValueError(f"{name} must be a tensor {words}, and not sparse, got {tensor!r:.100}")
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{name} must have one of the dtypes {DTYPES}, got {tensor.dtype}")
    shape = tuple(tensor.shape)
    if any(_fits(shape, sizes) for sizes in shapes.values()):
        return
    expected = " or ".join(
        str([("any" if size is None else size) for size in sizes]) for sizes in shapes.values()
    )
    swapped = (shape[1], shape[0], *shape[2:]) if len(shape) > 1 else shape
    fits = shape != swapped and any(_fits(swapped, sizes) for sizes in shapes.values())
    raise ValueError(
        f"{name} must be {words}, here {expected}, got {list(shape)}" + ROWS_FIRST * fits
    )


ROWS_FIRST = "; rows come first, then the batch; use transpose(0, 1) if the batch is first"


def _fits(shape: tuple[int, ...], sizes: tuple[int | None, ...]) -> bool:
    """Return True if a shape has these sizes; None allows any size except 0."""
    return len(sizes) == len(shape) and all(
        size > 0 if expected is None else size == expected
        for size, expected in zip(shape, sizes, strict=True)
    )


def sequence_of_rows(groups: Groups, x: torch.Tensor, options: Options) -> PackedSequence:
    """Return the result of `sequence_of` for the shard x [s, b, ...] of this rank.

    If the sizes would be valid with rows and batch swapped, the error message states this.
    """
    try:
        return sequence_of(groups, options, x.shape[0] * groups.size)
    except ValueError as error:
        try:
            sequence_of(groups, options, x.shape[1] * groups.size)
        except ValueError:
            raise error from None
        raise ValueError(f"{error}{ROWS_FIRST}") from None


def check_together(tensors: dict[str, torch.Tensor], dtype: bool) -> None:
    """Raise ValueError unless all tensors are on the device of the first tensor.

    Args:
        tensors: Tensors by name.
        dtype: True if all tensors must also have the dtype of the first tensor.
    """
    (name, first), *later = tensors.items()
    for other_name, tensor in later:
        if tensor.device != first.device or (dtype and tensor.dtype != first.dtype):
            raise ValueError(
                f"{other_name} must have the device{' and the dtype' if dtype else ''} of {name}, "
                f"{first.dtype} on {first.device}, got {tensor.dtype} on {tensor.device}"
            )


def check_name(name: str, value: object, names: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of `names`."""
    if not isinstance(value, str) or value not in names:
        raise ValueError(f"{name} must be one of {', '.join(names)}, got {value!r}")


def check_final(value: object) -> None:
    """Raise ValueError unless `return_final_state` is a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"return_final_state must be True or False, got {value!r:.100}")


def check_device(groups: Groups, name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless the groups can exchange tensors on the device of `tensor`."""
    moved, kind = groups.devices, tensor.device.type
    if groups.size > 1 and moved and kind not in moved:
        needed = {"cpu": "gloo", "cuda": "nccl"}.get(kind)
        raise ValueError(
            f"groups: backend {groups.backend} sends only {' and '.join(moved)} tensors, got "
            f"{name} on {kind}; "
            + (f"make the process group with backend {needed}" if needed else "move the tensor")
        )


def check_rates(rates: Any) -> None:
    """Raise ValueError unless `rates` is None or has valid rates of links, as in `mb.Rates`."""
    if rates is None:
        return
    for name, least in (("intra", "positive"), ("inter", "positive"), ("latency", "0 or more"),
                        ("posting", "0 or more")):  # fmt: skip
        value: Any = getattr(rates, name, None)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or value < 0 or (least == "positive" and not value):
            raise ValueError(
                f"rates must be mb.Rates whose {name} is a number ({least}), got {rates!r}"
            )


def sequence_of(groups: Groups, options: Options, seq_len: int) -> PackedSequence:
    """Return the layout, the length, and the documents or the tree of a call.

    Raises:
        ValueError: An option is invalid, or layout, length, documents and tree do not match.
    """
    layout, cu_seqlens, tree = options.layout, options.cu_seqlens, options.tree
    reverse = options.reverse
    if not isinstance(reverse, bool) and reverse != "both":
        raise ValueError(f"reverse must be False, True or 'both', got {reverse!r:.100}")
    if tree is not None:
        if cu_seqlens is not None:
            raise ValueError("tree: mutually exclusive with cu_seqlens; use only one of them")
        tree = tree_mask(tree)
        if tree.window is not None:
            raise ValueError(
                f"tree has window {tree.window}, but linear attention has no windows; use a tree "
                "without a window"
            )
        if tree.bounds[-1] != seq_len:
            raise ValueError(
                f"tree has {tree.bounds[-1]} rows, but the {groups.size} ranks hold {seq_len} "
                "positions; use equal numbers"
            )
    bounds = None if cu_seqlens is None else document_bounds(cu_seqlens)
    if bounds is not None and bounds[-1] != seq_len:
        raise ValueError(
            f"cu_seqlens must end at {seq_len}, the number of positions of the {groups.size} "
            f"ranks, got {bounds[-1]}"
        )
    if not isinstance(layout, (str, Layout)):
        raise ValueError(
            "layout must be the name of a layout, such as 'zigzag', or made by mb.layout.make, got "
            f"{layout!r}"
        )
    if isinstance(layout, str):
        names = (*LAYOUTS, "balanced")
        if layout not in names:
            raise ValueError(
                f"layout must be one of {', '.join(sorted(names))}, or made by mb.layout.make, "
                f"got {layout!r}"
            )
        extra: dict[str, Any] = {}
        if layout == "balanced":
            extra = {"cu_seqlens": cu_seqlens, "per_node": groups.topology.per_node, "tree": tree}
        layout = make(layout, cp_size=groups.size, **extra)
    if layout.cp_size != groups.size:
        raise ValueError(
            f"layout is for {layout.cp_size} ranks, but groups have {groups.size}; make it with "
            f"cp_size={groups.size}"
        )
    layout.check(seq_len)
    if reverse and tree is not None:
        bounds, tree = _documents_of(tree, reverse), None
    bounds = None if bounds is None else tuple(bounds.tolist())
    return PackedSequence(layout, seq_len, bounds, tree, reverse)


def _documents_of(tree: Any, reverse: Reverse) -> np.ndarray:
    """Return the bounds of the segments of a tree. Raise ValueError if a segment has a parent.

    In reverse, states would pass from several continuations to one segment, which is not defined.
    """
    continued = np.flatnonzero(tree.parents >= 0)
    if len(continued):
        row, parent = tree.bounds[[continued[0], tree.parents[continued[0]]]].tolist()
        raise ValueError(
            f"tree: the segment at row {row} continues the segment at row {parent}, but "
            f"reverse={reverse!r} does not support branches; use a tree in which no segment "
            "continues another one, or reverse=False"
        )
    return tree.bounds


def check_reverse_gates(reverse: Reverse, tensors: Tensors) -> None:
    """Raise ValueError unless reverse_decay and reverse_beta fit reverse, decay and beta."""
    for name in ("decay", "beta"):
        gate, forward = tensors[f"reverse_{name}"], tensors[name]
        if gate is None:
            continue
        if reverse != "both":
            raise ValueError(
                f"reverse_{name} requires reverse='both', got reverse={reverse!r:.100}; pass the "
                f"tensor as {name}"
            )
        if forward is None:
            raise ValueError(f"reverse_{name} requires {name}, got {name}=None; pass both tensors")
        check_tensor(f"reverse_{name}", gate, {f"shape of {name}": tuple(forward.shape)})
        check_together({name: forward, f"reverse_{name}": gate}, dtype=True)


def check_initial(
    initial: Any, documents: int, shape: tuple[int, ...], device: torch.device
) -> None:
    """Raise ValueError unless `initial` is None or has a state [b, h, d, w] per document."""
    if initial is None:
        return
    check_tensor("initial_state", initial, {"documents, b, h, d, w": (documents, *shape)})
    if initial.device != device:
        raise ValueError(f"initial_state must be on {device}, got {initial.device}")


def check_tree(sequence: PackedSequence, algorithm: str, initial: Any, final: bool) -> None:
    """Raise ValueError if the sequence has a tree and an option that trees do not support."""
    if sequence.tree is None:
        return
    if algorithm not in OVER_TREES:
        raise ValueError(
            f"algorithm: {algorithm} passes states along chains, but a tree branches; use "
            "'all_gather' or 'auto' with tree="
        )
    states = (("initial_state", initial is not None), ("return_final_state", final))
    for name, present in states:
        if present:
            raise ValueError(
                f"{name}: not supported with a tree, whose roots begin at zero; call without "
                f"{name} or without tree="
            )


Tensors = dict[str, Any]  # name -> tensor or None


class LocalWork(NamedTuple):
    """Settings of the computation of a rank on its own rows.

    Attributes:
        form: Form of linear attention.
        kernel: Name of the kernel.
        why: Reason why "auto" selects no faster kernel, or empty.
        scale: Factor of the outputs.
    """

    form: Form
    kernel: str
    why: str
    scale: float


class Options(NamedTuple):
    """Keywords that linear attention, state scan and short convolution have in common."""

    layout: Any
    cu_seqlens: Any
    algorithm: Any = "auto"
    rates: Any = None
    tree: Any = None
    reverse: Any = False

    @classmethod
    def of(
        cls,
        layout: Any,
        cu_seqlens: Any,
        algorithm: Any = None,
        rates: Any = None,
        tree: Any = None,
        reverse: Any = None,
    ) -> Options:
        """Return the options, with defaults for None."""
        return cls(
            default(layout, "zigzag"), cu_seqlens, default(algorithm, "auto"), rates, tree,
            default(reverse, False),
        )  # fmt: skip


@dataclass(frozen=True)
class ChainRequest:
    """Checked arguments of a call of linear attention, state scan or short convolution.

    Attributes:
        sequence: Layout, length, and documents or tree.
        device: Device of the tensors.
        signature: Shape and dtype of each tensor for which the plan is made, by name.
        states: Shape and dtype of the states that are sent; None if only rows of a convolution are
            sent.
        local: Settings of the local computation of linear attention, or None.
        options: Options of the call.
        facts: Values that must be the same on all ranks.
    """

    sequence: PackedSequence
    device: torch.device
    signature: tuple[tuple[str, Any], ...]
    states: States | None
    local: LocalWork | None
    options: Options
    facts: Facts


def spread(decay: torch.Tensor | None, v: torch.Tensor) -> torch.Tensor | None:
    """Return the decay of every row. A constant decay [h] is expanded to all rows of v."""
    if decay is None or decay.dim() > 1:
        return decay
    return decay.expand(*v.shape[:2], -1)


def default(value: Any, otherwise: Any) -> Any:
    """Return `value`, or `otherwise` if it is None."""
    return otherwise if value is None else value


def described(tensor: Any) -> Any:
    """Return the shape and dtype of a tensor, on which a plan depends; None for None."""
    return None if tensor is None else (tuple(tensor.shape), tensor.dtype)


def request_of(
    groups: Groups,
    sequence: PackedSequence,
    tensors: Tensors,
    states: States | None,
    local: LocalWork | None,
    options: Options,
    extra: Facts,
    final: bool,
) -> ChainRequest:
    """Check the options of a call, and return its checked arguments.

    Args:
        groups: Groups of the rank.
        sequence: Layout, length, and documents or tree.
        tensors: Tensors by name, optionally with an initial_state.
        states: Shape and dtype of the states that are sent, or None.
        local: Settings of the local computation, or None.
        options: Options of the call.
        extra: Further values that must be the same on all ranks.
        final: True if final states are needed.

    Raises:
        ValueError: The options are invalid.
    """
    check_name("algorithm", options.algorithm, ALGORITHMS)
    check_final(final)
    if options.rates is not None and options.algorithm != "auto":
        raise ValueError(
            f"rates require algorithm='auto', got algorithm={options.algorithm!r}; remove rates"
        )
    check_rates(options.rates)
    check_tree(sequence, options.algorithm, tensors.get("initial_state"), final)
    initial = tensors.pop("initial_state", None)
    first = next(t for t in (tensors.get(n) for n in ("q", "increment", "x")) if t is not None)
    chains = chains_of(groups, sequence)  # raises for layouts without chains
    if states is not None:
        check_initial(initial, chains.documents, (states.batch, *states.sizes), first.device)
    shapes = {name: described(t) for name, t in tensors.items()}
    if "increment" in shapes:  # ranks hold different numbers of pieces
        shapes = {n: s and (s[0][1:], s[1]) for n, s in shapes.items()}
    facts: Facts = {
        "groups": groups.topology,
        **shapes,
        "initial_state": described(initial),
        "return_final_state": final,
        "device": first.device.type,
        "needs_grad": tuple(
            t is not None and t.requires_grad for t in (*tensors.values(), initial)
        ),
        "layout": sequence.layout,
        "seq_len": sequence.seq_len,
        "cu_seqlens": sequence.bounds,
        "tree": sequence.tree,
        "reverse": sequence.reverse,
        "algorithm": options.algorithm,
        "rates": options.rates,
        **extra,
    }
    signature = tuple((name, described(t)) for name, t in tensors.items())
    return ChainRequest(sequence, first.device, signature, states, local, options, facts)


def is_finite(value: object) -> bool:
    """Return True if `value` is a finite number that a float can represent."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False

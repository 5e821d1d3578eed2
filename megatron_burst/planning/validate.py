# SPDX-License-Identifier: Apache-2.0
"""Checks of one rank's arguments, and their default values, before ranks communicate.

Unsupported arguments raise ValueError with a message that suggests an alternative. Checks read no
values of tensors, only shapes, strides, dtypes, devices and `requires_grad`. They must not
communicate, so that every rank reaches the comparison of arguments.

`check` also does the following:

- It calls the methods of user-defined masks (`masks.verify.check_custom`), and stores in a cache of
the groups which masks were checked.
- It imports packages of kernels, to pick the kernel or to check that the kernel is available.
- It reads the environment variable CUDA_DEVICE_MAX_CONNECTIONS (`comm.relays.one_queue`).

Shape letters: s local rows, b batch, h query heads, k key/value heads, d width, w value width.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..autotune.rates import Rates, check_rates
from ..comm.consensus import Facts
from ..comm.groups import Groups
from ..comm.relays import one_queue
from ..kernels import registry
from ..kernels.base import Kernel, Scoring
from ..kernels.online_softmax import accumulation_dtype
from ..layout import LAYOUTS, Layout, Replicated, check_fraction, make
from ..masks import Causal, Mask
from ..masks.base import custom_parts
from ..masks.verify import check_custom
from ..options import (
    SIDES,
    AttentionOptions,
    algorithms,
)
from ..schedule.cost import Sizes
from ..schedule.head_shares import Share, check_heads
from ..schedule.topology import alternatives, divisors

if TYPE_CHECKING:
    from ..autotune.select import Choice

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Signature = tuple[tuple[tuple[int, ...], torch.dtype, str], ...]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NeedsGrad = tuple[bool, bool, bool]
MASKS_CHECKED = 1 << 10  # cache size: custom masks that were checked
WIRE = {"fp32": torch.float32, "bf16": torch.bfloat16}  # `options.WIRE_DTYPES` without "auto"


@dataclass(frozen=True)
class Request:
    """Checked arguments of one rank, before ranks compare them.

    Attributes:
        tensors: q, k and v; v is k if `values_are_keys`.
        options: Options in which names and defaults are replaced by a `Layout`, a mask and numbers.
            "auto" is resolved later.
        layout: Layout of the queries, and of the keys unless `key_layout` is set.
        key_layout: Layout of keys that are another sequence, or `Replicated`; None if keys and
            queries are the same sequence.
        seq_len: Number of positions in the sequence of the queries, over all ranks.
        key_len: Number of positions in the sequence of the keys, over all ranks.
        mask: Mask.
        kernel: Local attention kernel.
        scoring: Scale and softcap.
        wire_dtype: dtype in which gradients are sent.
        needs_grad: Three booleans: whether q, k and v need a gradient.
        facts: Values by name that must be equal on all ranks; ranks compare them.
        values_are_keys: True if values are the keys, which are then sent once.
        choice: Settings that algorithm "auto" chose, and the reason; None before the choice, and
            with another algorithm.
        relay_stream: True if passes may use a relay stream (`comm.relays`).
    """

    tensors: QKV
    options: AttentionOptions
    layout: Layout
    key_layout: Layout | Replicated | None
    seq_len: int
    key_len: int
    mask: Mask
    kernel: Kernel
    scoring: Scoring
    wire_dtype: torch.dtype
    needs_grad: NeedsGrad
    facts: Facts
    values_are_keys: bool = False
    choice: Choice | None = None
    relay_stream: bool = False

    @property
    def sizes(self) -> Sizes:
        """Return the sizes of this rank's tensors, before the all-to-all of heads."""
        q, k, v = self.tensors
        return Sizes(
            tokens=q.shape[0], batch=q.shape[1], heads=q.shape[2], kv_heads=k.shape[2],
            width=q.shape[3], value_width=v.shape[3], itemsize=q.element_size(),
            stat_itemsize=accumulation_dtype(q.dtype).itemsize,
            wire_itemsize=self.wire_dtype.itemsize, needs_grad=self.needs_grad,
            key_tokens=k.shape[0], values_are_keys=self.values_are_keys,
        )  # fmt: skip


def check(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    groups: Groups,
    options: AttentionOptions,
    needs_grad: NeedsGrad | None = None,
    sink: torch.Tensor | None = None,
    max_logits: torch.Tensor | None = None,
    rates: Rates | None = None,
) -> Request:
    """Check the arguments of an attention call on one rank.

    The docstring of the module lists the side effects.

    Args:
        tensors: q, k and v, or None for v if values are the keys.
        groups: Argument of `mb.prepare`.
        options: Options of the call.
        needs_grad: Argument of `mb.prepare`.
        sink: Argument of `mb.prepare`.
        max_logits: Argument of `mb.prepare`.
        rates: Argument of `mb.prepare`.

    Returns:
        The checked arguments of this rank.

    Raises:
        ValueError: An argument is not supported.
    """
    q, k, v = tensors
    values_are_keys = v is None
    v = k if v is None else v
    check_shapes(q, k, v, other_keys=options.key_layout is not None)
    _check_device(groups, q)
    _check_names(options)
    _check_algorithm(options.algorithm, groups)
    _check_row_chunks(options, q.shape[0])
    if values_are_keys and options.sequence_chunks > 1:
        raise ValueError(
            "v is None (values are the keys), and row chunks do not support it, got sequence_chunks"
            f"={options.sequence_chunks}; pass v=k, or use sequence_chunks=1"
        )
    if rates is not None:
        _check_rates(rates, options.algorithm)
    sequences = _sequences(options, groups, q, k)
    if sequences.replicated:  # ranks share no heads and send no keys: nothing to choose
        options = _without_choice(options)
    else:
        check_heads(q.shape[2], k.shape[2], groups.topology, options.algorithm)
    if options.head_chunks is not None:
        sharing = 1 if sequences.replicated else groups.topology.ulysses
        _check_head_chunks(options.head_chunks, sharing, k)
    mask = _checked_mask(options, sequences, groups)
    _check_numbers(options)
    # Ranks compare facts as text, in which 30 and 30.0 differ.
    softcap = None if options.softcap is None else float(options.softcap)
    if max_logits is not None:
        check_max_logits(max_logits, q)
    kernel = registry.make(
        options.kernel, q, k, v, softcap, mask,
        beside_rings=groups.topology.ring_size > 1 and not sequences.replicated,
        maximum=max_logits is not None,
    )  # fmt: skip
    wire_dtype = _wire_dtype(options, q)
    if sink is not None:
        check_sink(sink, q)
    needs_grad = _needs_grad(needs_grad, (q, k, v))
    if values_are_keys:
        needs_grad = (*needs_grad[:2], needs_grad[1])
    scale = q.shape[-1] ** -0.5 if options.softmax_scale is None else float(options.softmax_scale)
    resolved = replace(
        options, layout=sequences.layout, key_layout=sequences.key_layout, mask=mask,
        softmax_scale=scale, softcap=softcap,
        store=float(options.store) if options.store else None,
        # With algorithm "auto" these are resolved later, like the algorithm.
        grad_wire_dtype="auto" if options.grad_wire_dtype == "auto" else wire_dtype,
        head_chunks=options.head_chunks or (None if options.algorithm == "auto" else 1),
    )  # fmt: skip
    relay_stream = q.device.type == "cuda" and not one_queue()
    facts: Facts = {
        "groups": groups.topology,
        "q": (tuple(q.shape), q.dtype),
        "k": (tuple(k.shape), k.dtype),
        "v": "the keys" if values_are_keys else (tuple(v.shape), v.dtype),
        "device": q.device.type,
        "relay stream": relay_stream,
        "needs_grad (q, k, v)": needs_grad,
        **{field.name: getattr(resolved, field.name) for field in fields(resolved)},
        "kernel": kernel.name,
        "sink": None if sink is None else (tuple(sink.shape), sink.dtype),
        "max_logits": max_logits is not None,
        "rates": rates,
    }
    return Request(
        (q, k, v), resolved, sequences.layout, sequences.key_layout, sequences.seq_len,
        sequences.key_len, mask, kernel, Scoring(scale, softcap), wire_dtype, needs_grad, facts,
        values_are_keys, relay_stream=relay_stream,
    )  # fmt: skip


class _Sequences(NamedTuple):
    """Layouts and lengths (in positions) of the sequences of queries and keys, as in `Request`.

    `replicated` is True if every rank holds all keys.
    """

    layout: Layout
    key_layout: Layout | Replicated | None
    seq_len: int
    key_len: int
    replicated: bool


def _sequences(
    options: AttentionOptions, groups: Groups, q: torch.Tensor, k: torch.Tensor
) -> _Sequences:
    """Return the sequences of a call, after the check of its layouts."""
    layout = _layout("layout", options.layout, groups, q.shape[0])
    seq_len, key_len, key_layout = q.shape[0] * groups.size, k.shape[0] * groups.size, None
    if options.key_layout is not None:
        key_layout = _key_layout(options.key_layout, groups, k.shape[0])
    replicated = isinstance(key_layout, Replicated)
    if replicated:
        key_len = k.shape[0]
    return _Sequences(layout, key_layout, seq_len, key_len, replicated)


def _checked_mask(options: AttentionOptions, sequences: _Sequences, groups: Groups) -> Mask:
    """Return the mask of a call, causal by default, after its check."""
    if options.mask is None and sequences.key_layout is not None:
        raise ValueError(
            "mask: keys of another sequence (key_layout) need a mask that compares their positions "
            "with those of the queries, such as mb.masks.Full(), got None"
        )
    mask = Causal() if options.mask is None else options.mask
    if not isinstance(mask, Mask):
        raise ValueError(f"mask must be a mask from mb.masks, got {mask!r}")
    if sequences.key_layout is None:
        mask.check(sequences.seq_len)
    else:
        mask.check_lengths(sequences.seq_len, sequences.key_len)
    _check_custom(mask, (sequences.seq_len, sequences.key_len), groups)
    return mask


def _wire_dtype(options: AttentionOptions, q: torch.Tensor) -> torch.dtype:
    """Return the dtype of sent gradients; for "auto", a dtype that `automatic` may replace."""
    requested: object = options.grad_wire_dtype
    if requested == "auto" and options.algorithm != "auto":
        raise ValueError(
            "grad_wire_dtype='auto' requires algorithm='auto', got "
            f"algorithm={options.algorithm!r}; use one of {', '.join(WIRE)}"
        )
    if requested is None or requested == "auto":
        return accumulation_dtype(q.dtype)
    dtype = WIRE.get(requested, requested) if isinstance(requested, str) else requested
    if dtype not in DTYPES:
        names = ", ".join(map(str, (*WIRE, "auto", *DTYPES)))
        raise ValueError(f"grad_wire_dtype must be None or one of {names}, got {requested!r}")
    assert isinstance(dtype, torch.dtype)
    return dtype


def _needs_grad(needs_grad: object, tensors: QKV) -> NeedsGrad:
    """Return whether q, k and v need a gradient. Default: `requires_grad` of the tensors."""
    if needs_grad is None:
        q, k, v = (t.requires_grad for t in tensors)
        return q, k, v
    if isinstance(needs_grad, (tuple, list)) and len(needs_grad) == 3:
        q, k, v = needs_grad
        if isinstance(q, bool) and isinstance(k, bool) and isinstance(v, bool):
            return q, k, v
    raise ValueError(f"needs_grad must be three booleans, for q, k and v, got {needs_grad!r}")


def _check_names(options: AttentionOptions) -> None:
    for name, value, names in (
        ("algorithm", options.algorithm, algorithms()),
        ("side", options.side, SIDES),
    ):
        if not isinstance(value, str) or value not in names:
            raise ValueError(f"{name} must be one of {', '.join(names)}, got {value!r}")


def _check_algorithm(algorithm: str, groups: Groups) -> None:
    ulysses, size = groups.topology.ulysses, groups.size
    if algorithm == "ulysses" and ulysses != size:
        raise ValueError(
            f"algorithm ulysses splits heads across all {size} ranks, but groups split them across "
            f"{ulysses}; make mb.Groups with ulysses={size}"
        )
    if algorithm == "hybrid" and ulysses == 1 < size:
        raise ValueError(
            "algorithm hybrid needs groups that share heads; make mb.Groups with ulysses=2 or more"
        )


def _check_head_chunks(head_chunks: int, sharing: int, k: torch.Tensor) -> None:
    ring_heads = Share(k.shape[2], sharing).heads_per_rank
    if type(head_chunks) is not int or head_chunks < 1 or ring_heads % head_chunks:
        raise ValueError(
            f"head_chunks must divide the {ring_heads} key/value heads of a rank's ring, "
            f"got {head_chunks!r}; use {alternatives(divisors(ring_heads))}"
        )


def _check_row_chunks(options: AttentionOptions, rows: int) -> None:
    for name in ("sequence_chunks", "row_blocks"):
        value = getattr(options, name)
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
    if rows % options.row_blocks:
        raise ValueError(
            f"row_blocks must divide the {rows} rows of a shard, got {options.row_blocks}; pad "
            f"to {-(-rows // options.row_blocks) * options.row_blocks} rows"
        )


def _check_rates(rates: Rates, algorithm: str) -> None:
    check_rates(rates)
    if algorithm != "auto":
        raise ValueError(f"rates require algorithm='auto', got algorithm={algorithm!r}")


def _without_choice(options: AttentionOptions) -> AttentionOptions:
    """Return options in which algorithm "auto" and its wire dtype are replaced by the defaults."""
    if options.algorithm != "auto":
        return options
    wire = None if options.grad_wire_dtype == "auto" else options.grad_wire_dtype
    return replace(options, algorithm="burst", grad_wire_dtype=wire)


def _check_custom(mask: Mask, lengths: tuple[int, int], groups: Groups) -> None:
    """Check each user-defined part of a mask, once per pair of query length and key length."""
    parts = custom_parts(mask)
    if not parts:
        return
    passed = groups.recent("checked masks", MASKS_CHECKED)
    for part in parts:
        key = type(part), part.complete_text, lengths
        if key not in passed:
            check_custom(part, *lengths)
        passed.keep(key, True)


def _check_numbers(options: AttentionOptions) -> None:
    numbers = {"softmax_scale": options.softmax_scale, "softcap": options.softcap}
    largest = sys.float_info.max  # an int may be larger
    for name, value in numbers.items():  # 0 is invalid: aten operators would compute -inf * 0
        if value is not None and not (_is_number(value) and 0 < value <= largest):
            raise ValueError(
                f"{name} must be a positive, finite number or None, got {_short(value)}"
            )
    if options.store is not None:
        check_fraction("store", options.store)


def _short(value: object) -> str:
    """Return the text of an option. Python refuses to convert ints of thousands of digits."""
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        return f"an integer of {value.bit_length()} bits, which exceeds the range of float64"
    return repr(value)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_device(groups: Groups, q: torch.Tensor) -> None:
    moved = groups.devices
    if groups.size > 1 and moved and q.device.type not in moved:
        needed = {"cpu": "gloo", "cuda": "nccl"}.get(q.device.type)
        raise ValueError(
            f"groups: backend {groups.backend} sends {' and '.join(moved)} tensors, got "
            f"{q.device.type} tensors; "
            + (
                f"make the process group with backend {needed}"
                if needed
                else f"move them to {moved[0]}"
            )
        )


def _key_layout(key_layout: object, groups: Groups, rows: int) -> Layout | Replicated:
    if isinstance(key_layout, Replicated):
        return key_layout
    if key_layout == "replicated":
        return Replicated()
    return _layout("key_layout", key_layout, groups, rows)


def _layout(name: str, layout: object, groups: Groups, rows: int) -> Layout:
    """Return the layout of the queries or of the keys.

    Args:
        name: Name of the option, "layout" or "key_layout".
        layout: Value of the option.
        groups: Groups of the call.
        rows: Number of rows per rank.
    """
    replicated = ", replicated" if name == "key_layout" else ""
    if not isinstance(layout, (str, Layout)):
        raise ValueError(f"{name} must be a name or a layout from mb.layout, got {layout!r}")
    if isinstance(layout, str):
        if layout == "balanced":
            raise ValueError(
                f"{name} 'balanced' depends on the batch; pass mb.layout.make('balanced', cp_size="
                f"{groups.size}, cu_seqlens=...)"
            )
        if layout not in LAYOUTS:
            raise ValueError(
                f"{name} must be one of {', '.join(sorted(LAYOUTS))}{replicated}, or a layout such "
                f"as mb.layout.make('block_striped', cp_size={groups.size}, block=...), got "
                f"{layout!r}"
            )
        layout = make(layout, cp_size=groups.size)
    if layout.cp_size != groups.size:
        raise ValueError(
            f"{name} is for {layout.cp_size} ranks, but groups have {groups.size}; make it with "
            f"cp_size={groups.size}"
        )
    if name == "key_layout" and not rows and not getattr(layout, "bounds", ()):
        return layout  # only layouts of documents depend on the number of positions
    try:
        layout.check(rows * groups.size)
    except ValueError as error:
        tensors = "k, v" if name == "key_layout" else "q, k, v"
        raise ValueError(
            f"{tensors}: {rows} rows on each of {groups.size} ranks are {rows * groups.size} "
            f"positions; {error}"
        ) from error
    return layout


# --- checks of tensors for plans and calls: only shapes, dtypes and devices ----------------------


def signature(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None) -> Signature:
    """Return (shape, dtype, device) of q, k and v; if v is None, the entry of k is repeated."""
    return tuple(map(_described, (q, k, k if v is None else v)))


def _described(t: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype, str]:
    return tuple(t.shape), t.dtype, str(t.device)


def check_shapes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, other_keys: bool = False
) -> None:
    """Check that q, k and v are tensors with matching shapes, dtypes and devices.

    Args:
        q: Queries of this rank.
        k: Keys of this rank.
        v: Values of this rank.
        other_keys: True if k and v may have more or fewer rows than q, or no rows.

    Raises:
        ValueError: A shape, dtype or device is not supported, or does not match the other tensors.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if isinstance(tensor, (list, tuple)):
            raise ValueError(
                f"{name} must be one tensor, the shard of this rank, got a list of {len(tensor)}; "
                "call the function once on each rank"
            )
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name} must be a tensor, got {tensor!r:.100}")
        if tensor.layout != torch.strided:
            raise ValueError(
                f"{name} must be a dense tensor, got a sparse one ({tensor.layout}); use "
                f"{name}.to_dense()"
            )
        sizes = tensor.shape[1:] if other_keys and name != "q" else tensor.shape
        if tensor.dim() != 4 or 0 in sizes:
            raise ValueError(f"{name} must be [s, b, heads, width], got {tuple(tensor.shape)}")
        if tensor.dtype not in DTYPES or tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(
                f"{name}: q, k, v must have the same device and the same dtype, one of {DTYPES}; "
                f"got {tensor.dtype} on {tensor.device}, and q is {q.dtype} on {q.device}"
            )
    if k.shape[:3] != v.shape[:3] or k.shape[1] != q.shape[1]:
        raise ValueError(
            "q, k, v must have the same b, and k, v the same s and number of heads, got "
            f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if len(k) != len(q) and not other_keys:
        raise ValueError(
            f"k, v must have the {len(q)} rows of q, got {len(k)}; keys of another sequence need "
            "key_layout"
        )
    if q.shape[3] != k.shape[3]:
        raise ValueError(
            f"k: width must be equal to the width of q, {q.shape[3]}, got {k.shape[3]}"
        )
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"k: the number of key/value heads must divide the {q.shape[2]} query heads, "
            f"got {k.shape[2]}"
        )


def check_sink(sink: torch.Tensor, q: torch.Tensor) -> None:
    """Check that `sink` has one logit per head of q.

    Raises:
        ValueError: `sink` has another shape or device, or is not a floating-point tensor.
    """
    tensor = isinstance(sink, torch.Tensor)
    expected = (q.shape[2],), q.device
    if not tensor or not sink.is_floating_point() or (sink.shape, sink.device) != expected:
        got = f"{sink.dtype} {tuple(sink.shape)} on {sink.device}" if tensor else repr(sink)
        raise ValueError(
            f"sink must be a floating-point tensor of shape [{q.shape[2]}], one logit per query "
            f"head, on {q.device}, got {got}"
        )


def check_max_logits(max_logits: torch.Tensor, q: torch.Tensor) -> None:
    """Check that `max_logits` has one element per head of q.

    Raises:
        ValueError: Shape, dtype, device or strides are not supported, or `max_logits` requires a
            gradient.
    """
    expected = accumulation_dtype(q.dtype), (q.shape[2],), q.device
    if isinstance(max_logits, torch.Tensor) and not max_logits.requires_grad:
        actual = max_logits.dtype, tuple(max_logits.shape), max_logits.device
        if actual == expected and max_logits.is_contiguous():  # kernels assume stride 1
            return
        strides = "" if max_logits.is_contiguous() else f" with strides {max_logits.stride()}"
        got = "{} {} on {}".format(*actual) + strides
    else:  # the text of a CUDA tensor has its values, which requires synchronization
        got = f"{max_logits!r:.100}"
    raise ValueError(
        f"max_logits must be a contiguous {expected[0]} tensor [{q.shape[2]}], one element per "
        f"query head, on {q.device} and without requires_grad, got {got}"
    )

"""One rank's checked arguments, before the ranks have compared them: of each operation on chains.

Decides what is refused, and what all ranks must agree on. Must not communicate.

Shape letters: s local rows, b batch, g query/key heads, h value heads, d width of keys, w width of
values, p pieces of this rank, c channels.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..comm.consensus import Facts
from ..comm.groups import Groups
from ..layout.layouts import integer
from . import forms
from .checks import (
    ALGORITHMS,
    accumulation_dtype,
    check_device,
    check_final,
    check_initial,
    check_name,
    check_rates,
    check_tensor,
    check_together,
    sequence_of,
)
from .form import Form
from .inputs import Inputs
from .kernels import registry
from .maps import LETTERS, shape_of
from .program import States
from .tables import Sequence, chains_of

Tensors = dict[str, Any]  # name -> tensor or None


class Local(NamedTuple):
    """What a rank computes of its rows: form, kernel and scale of linear attention."""

    form: Form
    kernel: str
    scale: float


class Options(NamedTuple):
    """Keywords of all operations on chains."""

    layout: Any
    cu_seqlens: Any
    algorithm: Any = "auto"
    rates: Any = None

    @classmethod
    def of(cls, layout: Any, cu_seqlens: Any, algorithm: Any = None, rates: Any = None) -> Options:
        """Where layout or algorithm is None, the default."""
        return cls(default(layout, "zigzag"), cu_seqlens, default(algorithm, "auto"), rates)


@dataclass(frozen=True)
class Request:
    """signature: shapes and dtypes that a plan is made for, by name; states: what travels, None for
    the rows of a convolution alone; options: as given, with facts of what all ranks agree on."""

    sequence: Sequence
    device: torch.device
    signature: tuple[tuple[str, Any], ...]
    states: States | None
    local: Local | None
    options: Options
    facts: Facts


def of_attention(
    groups: Groups,
    tensors: Tensors,
    options: Options,
    form: str,
    kernel: str,
    scale: float | None,
    initial: Any = None,
    final: bool = False,
) -> Request:
    """Of `mb.linear_attention`. tensors: q, k, v, decay and beta, the last two may be None."""
    q, k, v, decay, beta = (tensors[name] for name in ("q", "k", "v", "decay", "beta"))
    check_tensor("q", q, {"s, b, g, d": (None,) * 4})
    check_tensor("k", k, {"s, b, g, d": tuple(q.shape)})
    rows, batch, few, width = q.shape
    check_tensor("v", v, {"s, b, h, w": (rows, batch, None, None)})
    heads, columns = v.shape[2:]
    if heads % few:
        raise ValueError(f"v: the {few} heads of q and k must divide its heads, got {heads}")
    found = forms.of(decay, beta, form)
    each = (rows, batch, heads)
    if decay is not None:
        check_tensor("decay", decay, {"s, b, h": each, "s, b, h, d": (*each, width), "h": (heads,)})
    if beta is not None:
        check_tensor("beta", beta, {"s, b, h": each})
    check_together({"q": q, "k": k, "v": v}, dtype=True)
    present = {name: t for name, t in tensors.items() if t is not None}
    check_together(present, dtype=False)
    check_device(groups, "q", q)
    if scale is not None and not _is_finite(scale):
        raise ValueError(f"scale must be a finite number or None, got {scale!r}")
    factor = width**-0.5 if scale is None else float(scale)
    sequence = sequence_of(groups, options.layout, rows * groups.size, options.cu_seqlens)
    inputs = Inputs(q, k, v, spread(decay, v), beta, factor)
    kernel = registry.make(kernel, found, inputs).name
    kind = "matrix" if found.delta else found.decay
    states = States(batch, (heads, width, columns), kind, accumulation_dtype(v.dtype))
    local = Local(found, kernel, factor)
    more: Facts = {"form": found.name, "kernel": kernel, "scale": factor}
    return _request(
        groups, sequence, {**tensors, "initial_state": initial}, states, local, options, more, final
    )


def of_states(
    groups: Groups,
    decay: Any,
    increment: Any,
    options: Options,
    seq_len: object,
    initial: Any = None,
    final: bool = False,
) -> Request:
    """Of `mb.state_scan`."""
    length = integer("seq_len", seq_len)
    sequence = sequence_of(groups, options.layout, length, options.cu_seqlens)
    pieces = len(chains_of(groups, sequence).of(groups.rank))
    check_tensor("increment", increment, {"p, b, h, d, w": (pieces, *(None,) * 4)})
    _, batch, heads, width, columns = increment.shape
    check_device(groups, "increment", increment)
    kind = "none"
    if decay is not None:
        of_one = {k: shape_of(k, batch, (heads, width, columns)) or () for k in LETTERS}
        check_tensor("decay", decay, {LETTERS[k]: (pieces, *of_one[k]) for k in LETTERS})
        kind = list(LETTERS)[decay.dim() - 3]
        check_together({"increment": increment, "decay": decay}, dtype=False)
    states = States(batch, (heads, width, columns), kind, accumulation_dtype(increment.dtype))
    tensors = {"decay": decay, "increment": increment, "initial_state": initial}
    return _request(groups, sequence, tensors, states, None, options, {}, final)


def of_rows(groups: Groups, x: Any, width: int, options: Options) -> Request:
    """Of `mb.short_convolution`."""
    check_tensor("x", x, {"s, b, c": (None,) * 3})
    check_device(groups, "x", x)
    sequence = sequence_of(groups, options.layout, x.shape[0] * groups.size, options.cu_seqlens)
    return _request(groups, sequence, {"x": x}, None, None, options, {"width": width}, False)


def spread(decay: torch.Tensor | None, v: torch.Tensor) -> torch.Tensor | None:
    """The decay of every row; [h] is that of all rows."""
    if decay is None or decay.dim() > 1:
        return decay
    return decay.expand(*v.shape[:2], -1)


def default(value: Any, otherwise: Any) -> Any:
    """`otherwise` in place of None."""
    return otherwise if value is None else value


def described(tensor: Any) -> Any:
    """What of a tensor a plan depends on."""
    return None if tensor is None else (tuple(tensor.shape), tensor.dtype)


def _request(
    groups: Groups,
    sequence: Sequence,
    tensors: Tensors,
    states: States | None,
    local: Local | None,
    options: Options,
    more: Facts,
    final: bool,
) -> Request:
    check_name("algorithm", options.algorithm, ALGORITHMS)
    check_final(final)
    if options.rates is not None and options.algorithm != "auto":
        raise ValueError(f"rates are for algorithm='auto', got {options.algorithm!r} beside them")
    check_rates(options.rates)
    given = tensors.pop("initial_state", None)
    first = next(t for t in (tensors.get(n) for n in ("q", "increment", "x")) if t is not None)
    chains = chains_of(groups, sequence)  # refuses layouts that have none
    if states is not None:
        check_initial(given, chains.documents, (states.batch, *states.sizes), first.device)
    shapes = {name: described(t) for name, t in tensors.items()}
    if "increment" in shapes:  # ranks hold different numbers of pieces
        shapes = {n: s and (s[0][1:], s[1]) for n, s in shapes.items()}
    facts: Facts = {
        "groups": groups.topology,
        **shapes,
        "initial_state": described(given),
        "return_final_state": final,
        "device": first.device.type,
        "needs_grad": tuple(t is not None and t.requires_grad for t in (*tensors.values(), given)),
        "layout": sequence.layout,
        "seq_len": sequence.seq_len,
        "cu_seqlens": sequence.bounds,
        "algorithm": options.algorithm,
        "rates": options.rates,
        **more,
    }
    signature = tuple((name, described(t)) for name, t in tensors.items())
    return Request(sequence, first.device, signature, states, local, options, facts)


def _is_finite(value: object) -> bool:
    """Is it a number that a float holds?"""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False

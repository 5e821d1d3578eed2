"""The options of `linear_cross_entropy`, and which values each may have."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, get_args

import torch

Mode = Literal["single_pass", "recompute"]
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True)
class LossOptions:
    """The options of a call, which must be the same on all ranks of its group."""

    ignore_index: int
    logit_scale: float
    logit_softcap: float | None
    z_loss: float
    label_smoothing: float
    vocab_size: int | None
    tile: int | None
    mode: str
    return_argmax: bool
    grad_enabled: bool


class Rule(NamedTuple):
    """What an option must be: in words, its kind of number, and which of these are good."""

    words: str
    kind: type
    good: Callable[[Any], bool]
    optional: bool = False


RULES = {
    "ignore_index": Rule("an integer, -100 by default", Integral, lambda x: abs(x) < 2**63),
    "logit_scale": Rule("a finite number, 1.0 for none", Real, math.isfinite),
    "logit_softcap": Rule(
        "a positive number, or None for no cap", Real, lambda x: 0 < x < math.inf, True
    ),
    "z_loss": Rule("a finite number from 0 on", Real, lambda x: 0 <= x < math.inf),
    "label_smoothing": Rule("a number from 0 to 1", Real, lambda x: 0 <= x <= 1),
    "vocab_size": Rule(
        "a positive integer, or None for all rows", Integral, lambda x: x >= 1, True
    ),
    "tile": Rule(
        "a positive number of bytes, an integer such as 1 << 30, or None for the default",
        Integral,
        lambda x: x >= 1,
        True,
    ),
}


def reasons(options: LossOptions) -> Iterator[str]:
    """Why these are refused, whatever the tensors are."""
    for name, rule in RULES.items():
        value = getattr(options, name)
        if isinstance(value, torch.Tensor):
            yield _tensor_option(name, value, rule)
        elif not (rule.optional and value is None) and not _follows(value, rule):
            yield f"{name} must be {rule.words}, got {told(value)}"
    if not (isinstance(options.mode, str) and options.mode in MODES):
        yield f"mode must be one of {', '.join(MODES)}, got {told(options.mode)}"
    yield from flag("return_argmax", options.return_argmax)


def _follows(value: Any, rule: Rule) -> bool:
    number = isinstance(value, rule.kind) and not isinstance(value, bool)
    return number and rule.good(value)


def _tensor_option(name: str, value: torch.Tensor, rule: Rule) -> str:
    """A tensor: its gradient would be lost, and to read it would make the device catch up."""
    if name == "logit_scale":
        remedy = "multiply hidden by it instead (hidden * logit_scale), which has its gradient"
    else:
        remedy = "pass a number; it gets no gradient"
    learnt = " that requires a gradient" if value.requires_grad else ""
    return f"{name} must be {rule.words}, got {told(value)}{learnt}: {remedy}"


def plain(options: LossOptions) -> LossOptions:
    """With Python's own numbers, so that ranks which pass 1 and 1.0 agree."""
    numbers = {}
    for name, rule in RULES.items():
        value = getattr(options, name)
        if value is not None:
            numbers[name] = int(value) if rule.kind is Integral else float(value)
    return replace(options, **numbers)


def flag(name: str, value: Any) -> Iterator[str]:
    """Why `value` is no boolean, if it is none."""
    if not isinstance(value, bool):
        yield f"{name} must be True or False, got {told(value)}"


def told(value: Any) -> str:
    """What arrived, in a few words."""
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)} of {value.dtype}"
    if value is None:
        return "None"
    return f"{type(value).__name__} {value!r:.60}"

# SPDX-License-Identifier: Apache-2.0
"""Checks of the options, tensors, labels and group of `linear_cross_entropy`.

Each check yields error messages, so that one ValueError lists all problems of a call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import torch
import torch.distributed as dist

from ..comm.consensus import Facts
from ..comm.operation import Operation
from ..kernels import torch_features
from ..kernels.online_softmax import accumulation_dtype
from .function import Sink
from .split import Split

Mode = Literal["single_pass", "recompute"]
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True)
class LossOptions:
    """Options of `linear_cross_entropy`, which must be equal on all ranks of the group."""

    ignore_index: int = -100
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    vocab_size: int | None = None
    tile: int | None = None
    mode: str = "recompute"
    return_argmax: bool = False
    grad_enabled: bool = field(default_factory=torch.is_grad_enabled)


class OptionRule(NamedTuple):
    """Requirement that the value of an option must meet.

    Attributes:
        words: Text of the requirement, for the error message.
        kind: `numbers.Integral` or `numbers.Real`.
        good: Function that returns True for a valid number of this kind.
        optional: True if None is valid too.
    """

    words: str
    kind: type
    good: Callable[[Any], bool]
    optional: bool = False


RULES = {
    "ignore_index": OptionRule("an integer, -100 by default", Integral, lambda x: abs(x) < 2**63),
    "logit_scale": OptionRule("a finite number (1.0: no scaling)", Real, math.isfinite),
    "logit_softcap": OptionRule(
        "a positive number, or None for no cap", Real, lambda x: 0 < x < math.inf, True
    ),
    "z_loss": OptionRule("a finite number >= 0", Real, lambda x: 0 <= x < math.inf),
    "label_smoothing": OptionRule("a number from 0 to 1", Real, lambda x: 0 <= x <= 1),
    "vocab_size": OptionRule(
        "a positive integer, or None for all rows", Integral, lambda x: x >= 1, True
    ),
    "tile": OptionRule(
        "a positive number of bytes, an integer such as 1 << 30, or None for the default",
        Integral,
        lambda x: x >= 1,
        True,
    ),
}


def reasons(options: LossOptions) -> Iterator[str]:
    """Yield an error message for each invalid option, without reading tensors of the call."""
    for name, rule in RULES.items():
        value = getattr(options, name)
        if isinstance(value, torch.Tensor):
            yield _tensor_option(name, value, rule)
        elif not (rule.optional and value is None) and not _follows(value, rule):
            yield f"{name} must be {rule.words}, got {described(value)}"
    if not (isinstance(options.mode, str) and options.mode in MODES):
        yield f"mode must be one of {', '.join(MODES)}, got {described(options.mode)}"
    yield from flag("return_argmax", options.return_argmax)


def _follows(value: Any, rule: OptionRule) -> bool:
    return is_number(value, rule.kind) and rule.good(value)


def is_number(value: Any, kind: type) -> bool:
    """Return whether `value` is a number of this kind and not a bool."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _tensor_option(name: str, value: torch.Tensor, rule: OptionRule) -> str:
    """Return the message for an option that is a tensor.

    A tensor is refused because its gradient would be lost, and reading it would synchronize the
    device.
    """
    if name == "logit_scale":
        remedy = "pass hidden * logit_scale instead, so that autograd computes its gradient"
    else:
        remedy = "pass a number; it gets no gradient"
    learnt = " that requires a gradient" if value.requires_grad else ""
    return f"{name} must be {rule.words}, got {described(value)}{learnt}: {remedy}"


def plain(options: LossOptions) -> LossOptions:
    """Convert the options to Python int and float, so that 1 and 1.0 are equal between ranks."""
    numbers = {}
    for name, rule in RULES.items():
        value = getattr(options, name)
        if value is not None:
            numbers[name] = int(value) if rule.kind is Integral else float(value)
    return replace(options, **numbers)


def flag(name: str, value: Any) -> Iterator[str]:
    """Yield an error message if `value` is not a bool."""
    if not isinstance(value, bool):
        yield f"{name} must be True or False, got {described(value)}"


def described(value: Any) -> str:
    """Return a short description of a value for messages."""
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)} of {value.dtype}"
    if value is None:
        return "None"
    return f"{type(value).__name__} {value!r:.60}"


DTYPES = (torch.float64, torch.float32, torch.bfloat16)
LABELS = (torch.int64, torch.int32, torch.int16, torch.int8)
LABELS += (torch.uint8, torch.uint16, torch.uint32)


class LossInputs(NamedTuple):
    """Tensors of a call of `linear_cross_entropy`, and the buffer for the weight gradient."""

    hidden: torch.Tensor
    weight: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor | None
    sink: Sink | None = None


def split_of(tp_group: Any, sequence_parallel: Any) -> Split:
    """Return the distribution of vocabulary and tokens over the group of a call.

    Args:
        tp_group: Tensor-parallel process group, or None.
        sequence_parallel: Option of the call; `checked` refuses a value that is not a bool.

    Raises:
        ValueError: The group is invalid. Only this rank raises the error, because it cannot inform
            other ranks without a valid group.
    """
    if tp_group is not None and not isinstance(tp_group, dist.ProcessGroup):
        hint = ""
        if tp_group is dist.GroupMember.NON_GROUP_MEMBER:
            hint = ", which is what dist.new_group returns on a rank outside the group"
        raise ValueError(
            "tp_group must be a torch.distributed.ProcessGroup (dist.new_group([0, 1]) or "
            "dist.group.WORLD), or None without tensor parallelism, "
            f"got {described(tp_group)}{hint}"
        )
    if tp_group is not None and not dist.is_initialized():
        raise ValueError(
            "tp_group: torch.distributed is not initialized: call "
            "dist.init_process_group before, and dist.destroy_process_group after the last call"
        )
    # `checked` refuses a value that is not a bool, on all ranks.
    return Split(tp_group, sequence_parallel is True and tp_group is not None)


@dataclass(frozen=True)
class LossRequest:
    """Checked arguments of a call.

    Attributes:
        inputs: Tensors, with labels in int64 and loss_mask in the accumulation dtype.
        options: Options as Python numbers.
        facts: Values that must be the same on all ranks of the group.
    """

    inputs: LossInputs
    options: LossOptions
    facts: Facts


Checked = TypeVar("Checked", bound=Any)


class HeadOperation(Operation[Checked, Checked]):
    """Base class of operations of the LM head, such as `LossOperation`.

    These operations have no separate plan: shapes and options determine the collectives, so the
    checked arguments are the plan.
    """

    split: Split

    def agree(self, facts: Facts | ValueError) -> None:
        self.split.agree(facts)

    def build(self, request: Checked) -> Checked:
        return request


@dataclass(frozen=True, kw_only=True)
class LossOperation(HeadOperation[LossRequest]):
    """Call of `linear_cross_entropy` on one rank, with its arguments."""

    split: Split
    inputs: LossInputs
    options: LossOptions
    sequence_parallel: Any

    def check(self) -> LossRequest:
        return checked(self.inputs, self.options, self.sequence_parallel, self.split)


def checked(
    inputs: LossInputs,
    options: LossOptions,
    sequence_parallel: Any,
    split: Split,
    *,
    labelled: int | None = None,
    extra: Iterable[str] = (),
) -> LossRequest:
    """Check the arguments of a call, and return them with the values that ranks compare (`facts`).

    The facts determine the collectives of the call. They include a checksum of the tensors that
    must be equal on all ranks of a group.

    Args:
        inputs: Tensors of the call.
        options: Options of the call.
        sequence_parallel: Option of the call.
        split: Distribution of vocabulary and tokens over the group.
        labelled: Required number of labels. Default: one label per row of hidden.
        extra: Error messages of other checks.

    Raises:
        ValueError: An argument is invalid. The message lists all problems.
    """
    problems = [*_kinds(inputs, sequence_parallel)]
    if not problems:
        problems += [
            *_tensors(inputs, split, labelled),
            *_vocabulary(options, inputs.weight, split),
        ]
    _raise([*problems, *reasons(options), *extra])
    hidden, weight, labels, mask, sink = inputs
    # Cast before comparing: a narrow dtype may not represent ignore_index or the vocabulary size.
    labels = labels.to(torch.int64)
    mask = None if mask is None else mask.to(accumulation_dtype(hidden.dtype))
    options = plain(options)
    _raise(_labels(labels, mask, options, options.vocab_size or len(weight) * split.size))
    facts: Facts = {
        "hidden": (tuple(hidden.shape), str(hidden.dtype), hidden.device.type),
        "weight": tuple(weight.shape),
        "labels": tuple(labels.shape),
        "loss_mask": "none" if mask is None else "given",
        "gradients of (hidden, weight)": (hidden.requires_grad, weight.requires_grad),
        "sequence_parallel": split.sequence_parallel,
        "options": options,
    }
    if split.size > 1:  # the next all-gather of headers synchronizes the device anyway
        facts["checksum of labels"] = checksum(labels)
        if mask is not None:
            facts["loss_mask"] = f"given, checksum {checksum(mask)}"
    return LossRequest(LossInputs(hidden, weight, labels, mask, sink), options, facts)


_SPREAD = 0x1E3779B97F4A7C15  # odd, with ones spread over all bits


def checksum(x: torch.Tensor) -> int:
    """Return a checksum of the bits of x, whose elements must have 4 or 8 bytes.

    Each element is mixed with its index, so one changed element or two swapped elements change the
    checksum.
    """
    bits = x.contiguous().view(torch.int32 if x.element_size() == 4 else torch.int64).reshape(-1)
    mixed = bits + torch.arange(len(bits), device=x.device) * _SPREAD
    # Nonlinear mixing: in a linear sum a larger number could cancel a smaller one.
    for shift in (30, 27):
        mixed = (mixed ^ (mixed >> shift)) * _SPREAD
    return int(mixed.sum())


def _raise(problems: list[str]) -> None:
    if problems:
        raise ValueError("; ".join(problems))


def _kinds(inputs: LossInputs, sequence_parallel: Any) -> Iterator[str]:
    """Yield an error message for each argument with a wrong type."""
    expected = {
        "hidden": "a torch.Tensor [..., d]",
        "weight": "a torch.Tensor [v, d]",
        "labels": "a torch.Tensor of integers",
        "loss_mask": "a torch.Tensor of numbers shaped like labels, or None",
    }
    for name, requirement in expected.items():
        value = getattr(inputs, name)
        if name == "loss_mask" and value is None:
            continue
        if not isinstance(value, torch.Tensor):
            hint = ""
            if isinstance(value, torch.nn.Module):
                hint = ": pass its .weight"
            elif value is not None:
                hint = ": make one with torch.tensor or torch.as_tensor"
            yield f"{name} must be {requirement}, got {described(value)}{hint}"
        elif value.layout is not torch.strided:
            yield f"{name} must be dense, got layout {value.layout}: call .to_dense()"
    sink = inputs.sink
    if sink is not None and not all(callable(getattr(sink, x, None)) for x in ("target", "done")):
        yield f"sink must have the methods target() and done(), or be None, got {described(sink)}"
    yield from flag("sequence_parallel", sequence_parallel)
    refused = torch_features.refusal(torch_features.PACKAGE)
    if refused is not None:
        yield f"{torch_features.PACKAGE} {refused}"


def _tensors(inputs: LossInputs, split: Split, labelled: int | None) -> Iterator[str]:
    hidden, weight, labels, loss_mask, _ = inputs
    if hidden.dtype not in DTYPES or weight.dtype != hidden.dtype:
        yield (
            f"hidden and weight must both be {', '.join(map(str, DTYPES))}, got {hidden.dtype} "
            f"and {weight.dtype}"
        )
    if hidden.dim() < 2 or weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        yield (
            f"hidden must be [..., d] and weight [v, d], got {list(hidden.shape)} and "
            f"{list(weight.shape)}"
        )
    elif not weight.numel():
        yield f"weight must have rows and a width of at least 1, got {list(weight.shape)}"
    expected = [s * (split.parts if i == 0 else 1) for i, s in enumerate(hidden.shape[:-1])]
    if labelled is not None:
        expected = [labelled]
    if hidden.dim() >= 2 and list(labels.shape) != expected:
        slices = f", {split.parts} slices" if split.parts > 1 else ""
        yield (
            f"labels must be {expected} for hidden {list(hidden.shape)}{slices}, "
            f"got {list(labels.shape)}"
        )
    if labels.dtype not in LABELS:
        yield (
            f"labels must be integers ({', '.join(map(str, LABELS))}), got {labels.dtype}: "
            "call .long()"
        )
    if loss_mask is not None:
        if loss_mask.shape != labels.shape:
            yield (
                f"loss_mask must be shaped like labels, {list(labels.shape)}, got "
                f"{list(loss_mask.shape)}"
            )
        if loss_mask.is_complex():
            yield f"loss_mask must be real, got {loss_mask.dtype}"
        if loss_mask.requires_grad:
            yield "loss_mask must not require a gradient: multiply the loss by it instead"
    devices = {str(t.device) for t in (hidden, weight, labels, loss_mask) if t is not None}
    if len(devices) > 1:
        yield f"all tensors must be on one device, got {sorted(devices)}"


def _vocabulary(options: LossOptions, weight: torch.Tensor, split: Split) -> Iterator[str]:
    rows, vocab_size = weight.shape[:1].numel() * split.size, options.vocab_size
    if isinstance(vocab_size, Integral) and vocab_size > rows:
        yield f"vocab_size must be from 1 to the {rows} rows of the weight, got {vocab_size}"


def _labels(
    labels: torch.Tensor, mask: torch.Tensor | None, options: LossOptions, count: int
) -> list[str]:
    """Return a list with an error message if a label with nonzero weight is not in the vocabulary.

    On CUDA a device-side assertion checks the labels, and the list is empty.
    """
    good = (labels == options.ignore_index) | ((labels >= 0) & (labels < count))
    if mask is not None:
        good |= mask == 0
    if labels.is_cuda:
        torch._assert_async(good.all())
        return []
    if good.all():
        return []
    condition = "" if mask is None else " for tokens whose loss_mask is not 0"
    return [
        f"labels must be in [0, {count}) or ignore_index ({options.ignore_index}){condition}, got "
        f"{labels[~good][0].item()}"
    ]

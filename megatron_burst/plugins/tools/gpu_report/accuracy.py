# SPDX-License-Identifier: Apache-2.0
"""Errors of every kernel against float64, relative to the errors of torch's attention.

Each kernel runs in bf16 on the same input as torch's attention. The input is divided as over two
ranks. The masks of `CASES` are tested with both sides (the tensors that ranks send in backward:
"kv" or "query"). A result is wrong if its error exceeds `BOUND` times the error of torch's
attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .... import masks
from ....cli.doctor.kernels import by_pairs, dense
from ....cli.doctor.report import Finding, note, ok, problem
from ....kernels.registry import KERNELS, make

BOUND = 4.0
PARTS = ("out", "dq", "dk", "dv")
HEADS, WIDTH = (4, 2), 128  # query heads and key/value heads; width of a head
LENGTH = {"cuda": 2048, "cpu": 128}  # positions of the sequence
SIDES = ("kv", "query")
Record = dict[str, Any]


class Case(NamedTuple):
    """Mask, and an independent definition of it as a function of query and key positions."""

    name: str
    mask: masks.Mask
    visible: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


CASES = (
    Case("causal", masks.Causal(), lambda row, column: column <= row),
    Case("full", masks.Full(), lambda row, column: (row >= 0) & (column >= 0)),
    Case(
        "window 64", masks.Window(63, 0), lambda row, column: (column <= row) & (row - column < 64)
    ),
)


def kernels(device: torch.device, records: list[Record]) -> Iterator[Finding]:
    """Check the results of all kernels, and report which kernel "auto" selects.

    Args:
        device: Device of the kernels.
        records: List to which a record per kernel, mask and side (tensors that backward sends: "kv"
            or "query") is appended. "errors" of a record has the kernel's largest errors of out,
            dq, dk and dv against float64; "torch" has the errors of torch's attention. If the
            kernel gives no result, "refused" or "failed" is the reason.

    Yields:
        A finding per kernel, and one for "auto".
    """
    problems = [(case, *_problem(case, device)) for case in CASES]
    for name in KERNELS:
        judged = []
        for case, inputs, truth, stock in problems:
            for side in SIDES:
                record: Record = {"kernel": name, "mask": case.name, "side": side}
                record |= _judged(name, case, side, inputs, truth) | {"torch": stock}
                judged.append(record)
        records += judged
        yield _finding(name, device, judged)
    q, k, v = problems[0][1][:3]  # shapes and dtypes are the same for all masks
    selected = [f"{make('auto', q, k, v, mask=case.mask).name} ({case.name})" for case in CASES]
    yield ok("kernel auto", f"selects {', '.join(selected)}")


def _finding(name: str, device: torch.device, records: Sequence[Record]) -> Finding:
    topic = f"kernel {name}"
    failed = [record["failed"] for record in records if "failed" in record]
    if failed:
        return problem(topic, f"fails on {device.type}: {failed[0]}", "use another kernel")
    ran = [record for record in records if "errors" in record]
    if not ran:
        return note(topic, f"not usable on {device.type}: {records[0]['refused']}")
    worst = max(ratio(record) for record in ran)
    masks_ = ", ".join(dict.fromkeys(record["mask"] for record in ran))
    text = f"largest error is {worst:.2f} times the error of torch's attention ({masks_})"
    if worst > BOUND:
        return problem(topic, f"wrong result on {device.type}: {text}", "use another kernel")
    return ok(topic, text)


def ratio(record: Record) -> float:
    """Return the kernel's error divided by torch's error, the maximum over out, dq, dk and dv."""
    pairs = [(record["errors"][part], record["torch"][part]) for part in PARTS]
    return max(math.inf if error is None else error / max(stock, 1e-7) for error, stock in pairs)


def _judged(name: Any, case: Case, side: Any, inputs: Sequence[torch.Tensor], truth: Any) -> Record:
    try:
        return {"errors": _errors(by_pairs(name, case.mask, side, inputs), truth)}
    except ValueError as reason:  # the kernel does not support the case
        text = str(reason).removeprefix("rank 0: ")
        return {"refused": text.split(";")[0].splitlines()[0]}
    except Exception as error:
        text = str(error).splitlines()[0] if str(error) else ""
        return {"failed": f"{type(error).__name__}: {text[:200]}"}


def _errors(got: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> Record:
    """Return the largest absolute errors of out, dq, dk and dv, by name.

    An error that is not finite is None, because JSON has no NaN.
    """
    errors: Record = {}
    for part, result, right in zip(PARTS, got, truth, strict=True):
        worst = (result.double() - right).abs().max().item()
        errors[part] = worst if math.isfinite(worst) else None
    return errors


def _problem(case: Case, device: torch.device) -> tuple[list[torch.Tensor], Any, Record]:
    """Return a test problem for a mask: its inputs, its exact results, and torch's errors.

    Inputs are q, k, v, dout in bf16. Exact results are out, dq, dk, dv in float64. Both have shape
    [positions, 1, heads, width]. Errors are the result of `_errors` for torch's attention.
    """
    draw, length = torch.Generator().manual_seed(2), LENGTH[device.type]
    heads = (HEADS[0], HEADS[1], HEADS[1], HEADS[0])
    inputs = [
        torch.randn(length, 1, count, WIDTH, generator=draw).to(device, torch.bfloat16)
        for count in heads
    ]
    positions = torch.arange(length, device=device)
    seen = case.visible(positions[:, None], positions[None, :])
    q, k, v, dout = inputs
    truth = dense(q, k, v, dout, seen)
    return inputs, truth, _errors(_stock(inputs, seen), truth)


def _stock(inputs: Sequence[torch.Tensor], seen: torch.Tensor) -> list[torch.Tensor]:
    """Return out, dq, dk, dv of torch's attention.

    Its inputs k and v are copied once per query head.
    """
    group = HEADS[0] // HEADS[1]
    wide = [x if x.shape[2] == HEADS[0] else x.repeat_interleave(group, 2) for x in inputs]
    *leaves, dout = (x.permute(1, 2, 0, 3).contiguous() for x in wide)
    for leaf in leaves:
        leaf.requires_grad_()
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        out = F.scaled_dot_product_attention(*leaves, attn_mask=seen)
        grads = torch.autograd.grad(out, leaves, dout)
    out, dq, dk, dv = (x.detach().permute(2, 0, 1, 3) for x in (out, *grads))
    dk, dv = (x.float().unflatten(2, (-1, group)).sum(3) for x in (dk, dv))
    return [out, dq, dk, dv]

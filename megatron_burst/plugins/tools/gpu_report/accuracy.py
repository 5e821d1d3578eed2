# SPDX-License-Identifier: Apache-2.0
"""Every kernel against float64, beside torch's own attention on the same input.

Each runs in bf16 on the pairs of two ranks, under three masks, with either side. A
kernel is wrong where its error is more than `BOUND` times torch's.
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
HEADS, WIDTH = (4, 2), 128  # query heads and key/value heads; of a head
LENGTH = {"cuda": 2048, "cpu": 128}  # of the whole sequence
SIDES = ("kv", "query")
Record = dict[str, Any]


class Case(NamedTuple):
    """A mask, and the same by hand: visible(row, column) of positions."""

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
    """A finding for each kernel, and one for what "auto" takes.

    To `records` one of each kernel, mask and side is added: "errors" and "torch", the largest error
    of each part against float64, or "refused" or "failed" with the reason.
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
    q, k, v = problems[0][1][:3]  # alike under all masks but for their numbers
    taken = [f"{make('auto', q, k, v, mask=case.mask).name} ({case.name})" for case in CASES]
    yield ok("kernel auto", f"takes {', '.join(taken)}")


def _finding(name: str, device: torch.device, records: Sequence[Record]) -> Finding:
    topic = f"kernel {name}"
    failed = [record["failed"] for record in records if "failed" in record]
    if failed:
        return problem(topic, f"fails on {device.type}: {failed[0]}", "take another kernel")
    ran = [record for record in records if "errors" in record]
    if not ran:
        return note(topic, f"not usable on {device.type}: {records[0]['refused']}")
    worst = max(ratio(record) for record in ran)
    masks_ = ", ".join(dict.fromkeys(record["mask"] for record in ran))
    what = f"errs at most {worst:.2f} times as much as torch's attention ({masks_})"
    if worst > BOUND:
        return problem(topic, f"computes wrongly on {device.type}: {what}", "take another kernel")
    return ok(topic, what)


def ratio(record: Record) -> float:
    """The largest of the kernel's errors over torch's, of all parts."""
    pairs = [(record["errors"][part], record["torch"][part]) for part in PARTS]
    return max(math.inf if error is None else error / max(other, 1e-7) for error, other in pairs)


def _judged(name: Any, case: Case, side: Any, inputs: Sequence[torch.Tensor], truth: Any) -> Record:
    try:
        return {"errors": _errors(by_pairs(name, case.mask, side, inputs), truth)}
    except ValueError as reason:  # it does not fit here, and says so
        text = str(reason).removeprefix("rank 0: ")
        return {"refused": text.split(";")[0].splitlines()[0]}
    except Exception as error:
        text = str(error).splitlines()[0] if str(error) else ""
        return {"failed": f"{type(error).__name__}: {text[:200]}"}


def _errors(got: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> Record:
    """The largest difference of each part; None, which JSON has, where one is not finite."""
    errors: Record = {}
    for part, result, right in zip(PARTS, got, truth, strict=True):
        worst = (result.double() - right).abs().max().item()
        errors[part] = worst if math.isfinite(worst) else None
    return errors


def _problem(case: Case, device: torch.device) -> tuple[list[torch.Tensor], Any, Record]:
    """Inputs, the truth, and the errors of torch's own attention."""
    draw, length = torch.Generator().manual_seed(2), LENGTH[device.type]
    heads = (HEADS[0], HEADS[1], HEADS[1], HEADS[0])
    inputs = [
        torch.randn(length, 1, each, WIDTH, generator=draw).to(device, torch.bfloat16)
        for each in heads
    ]
    every = torch.arange(length, device=device)
    seen = case.visible(every[:, None], every[None, :])
    q, k, v, dout = inputs
    truth = dense(q, k, v, dout, seen)
    return inputs, truth, _errors(_stock(inputs, seen), truth)


def _stock(inputs: Sequence[torch.Tensor], seen: torch.Tensor) -> list[torch.Tensor]:
    """out, dq, dk, dv of torch's own operator; shared keys and values are repeated for it."""
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

# SPDX-License-Identifier: Apache-2.0
"""Test of attention kernels: one process computes the kernel calls of a ring of two ranks.

The doctor compares each kernel with the kernel "reference". The GPU report compares each kernel
with the dense formula in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch

from ... import masks
from ...kernels.base import Rows, Scoring
from ...kernels.online_softmax import empty_result, row_delta
from ...kernels.registry import KERNELS, make
from ...layout.layouts import Span
from .report import Finding, absent, note, ok, problem

# Maximum rounding error of a kernel, relative to the largest result.
ERROR = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
LENGTH, HEADS, WIDTH = 400, (4, 2, 2, 4), 128  # of q, k, v and the gradient of the result
MASKS = {"causal": masks.Causal(), "other": masks.Window(63, 0)}


def kernels() -> Iterator[Finding]:
    """Yield a finding per attention kernel, and one for the kernels that "auto" selects.

    Each kernel runs forward and backward on this machine's device and is compared with the kernel
    "reference". "reference" itself has a finding only if it fails. The inputs have fewer key heads
    than query heads, and a length that is not a power of two. Some backward calls get no attention
    output. torch does not test its operators with such inputs.
    """
    cuda = torch.cuda.is_available()
    device, dtype = (
        torch.device("cuda" if cuda else "cpu"),
        torch.bfloat16 if cuda else torch.float32,
    )
    draw, right = torch.Generator().manual_seed(0), {}
    inputs = [torch.randn(LENGTH, 1, h, WIDTH, generator=draw).to(device, dtype) for h in HEADS]
    for name in KERNELS:
        outcomes = [_outcome(name, mask, inputs) for mask in MASKS.values()]
        right[name] = [
            isinstance(error_or_failure, float) and error_or_failure <= ERROR[dtype]
            for error_or_failure in outcomes
        ]
        if name != "reference" or not all(right[name]):
            yield _kernel(name, device, outcomes, ERROR[dtype])
    q, k, v, _ = inputs
    try:
        taken = [make("auto", q, k, v, mask=mask).name for mask in MASKS.values()]
    except ValueError as error:
        yield problem("kernel auto", str(error), "--burst-kernel reference, for small tests")
        return
    parts = [f"{name} for {kind} masks" for name, kind in zip(taken, MASKS, strict=True)]
    words = taken[0] if len(set(taken)) == 1 else ", ".join(parts)
    broken = {name for i, name in enumerate(taken) if not right[name][i]}
    if broken:
        working = [name for name, passed in right.items() if all(passed)]
        yield problem(
            "kernel auto",
            f"selects {words}, but {', '.join(sorted(broken))} does not work here",
            f"--burst-kernel {' or '.join(working) or 'reference'}",
        )
    else:
        yield ok("kernel auto", f"selects {words}")


def _outcome(name: str, mask: masks.Mask, inputs: Sequence[torch.Tensor]) -> float | Exception:
    """Return the largest error relative to "reference", or the exception that the kernel raised."""
    try:
        results = [by_pairs(kernel, mask, "query", inputs) for kernel in (name, "reference")]
    except Exception as failure:
        return failure
    return max(error(result, right) for result, right in zip(*results, strict=True))


def _kernel(
    name: str, device: torch.device, outcomes: Sequence[float | Exception], bound: float
) -> Finding:
    """Convert the results of `_outcome` for the masks in `MASKS` to a finding.

    The finding is a problem if results are wrong. It is "absent" if the kernel is not installed or
    does not support this device or width. It is a note after any other failure.

    Args:
        name: Name of the kernel.
        device: Device on which the kernel ran.
        outcomes: Results of `_outcome`, in the order of `MASKS`.
        bound: Largest relative error that counts as correct.
    """
    topic = f"kernel {name}"
    for off in outcomes:
        if isinstance(off, float) and off > bound:
            text = f"the largest error is {off:.1g} times the largest value"
            return problem(topic, f"wrong results on {device.type}: {text}", "use another kernel")
    causal, window = outcomes
    if isinstance(causal, Exception):
        reason = str(causal).split(";")[0].splitlines()[0]
        finding = absent if isinstance(causal, ValueError) else note
        return finding(topic, f"not usable on {device.type}: {reason}")
    windows = "not usable" if isinstance(window, Exception) else f"within {window:.0e}"
    return ok(
        topic,
        f"runs on {device.type}, within {causal:.0e} of the reference; windows: {windows}"
        f"{_documents(name, device)}",
    )


def _documents(name: str, device: torch.device) -> str:
    """Return why "aten_cudnn" needs one cuDNN call per packed document; "" if one call suffices."""
    if name != "aten_cudnn":
        return ""
    from ...kernels.operators_cuda import CudaCudnn

    reason = CudaCudnn(device).separate
    return "" if reason is None else f"; a call for each packed document, because one call {reason}"


def error(result: torch.Tensor, exact: torch.Tensor, whole: torch.Tensor | None = None) -> float:
    """Return the largest absolute error, divided by the largest exact value; inf if not finite.

    Args:
        result: Computed values.
        exact: Exact values.
        whole: Tensor that contains `exact`; its largest value is the divisor. Default: `exact`.
    """
    largest = (exact if whole is None else whole).double().abs().max()
    off = ((result.double() - exact.double()).abs().max() / largest).item()
    return off if math.isfinite(off) else math.inf


def by_pairs(
    name: Any, mask: masks.Mask, side: Any, inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return out, dq, dk, dv [s, 1, heads, d] as two ranks in layout zigzag would compute them.

    This process runs the kernel calls of both ranks.

    Args:
        name: Kernel, as in `mb.prepare`.
        mask: Mask of the whole sequence.
        side: Tensors that ranks would send in backward, "kv" or "query". With "query", backward
            over one rank's queries and the other rank's keys gets no attention output.
        inputs: q, k, v and the gradient of out, [s, 1, heads, d], s divisible by four.

    Raises:
        ValueError: The kernel does not support these tensors.
    """
    q, k, v, _ = inputs
    kernel = make(name, q, k, v, mask=mask, beside_rings=True)
    scoring, rows = Scoring(q.shape[-1] ** -0.5), len(q) // 4
    spans = [
        [Span(0, 1, rows), Span(3 * rows, 1, rows)],
        [Span(rows, 1, rows), Span(2 * rows, 1, rows)],
    ]
    shards = [[_rows(x, shard_spans) for x in inputs] for shard_spans in spans]
    results = [empty_result(shard[0], v.shape[-1]) for shard in shards]
    pairs = list(product(range(2), repeat=2))
    planned = kernel.works_for(mask, [(spans[i], spans[j]) for i, j in pairs])
    works = dict(zip(pairs, planned, strict=True))
    for (i, j), work in works.items():
        if work is not None:
            (out, lse), (_, key, value, _) = results[i], shards[j]
            kernel.forward(shards[i][0], key, value, work, scoring, out, lse)
    sums = [[torch.zeros_like(x, dtype=results[0][0].dtype) for x in shard[:3]] for shard in shards]
    for (i, j), work in works.items():
        if work is not None:
            (query, _, _, upper), (_, key, value, _) = shards[i], shards[j]
            own, lse = results[i][0].to(q.dtype), results[i][1]
            known_out = own if i == j or side == "kv" else None
            queries = Rows(query, upper, lse, row_delta(upper, own, lse.dtype), known_out)
            dq, dk, dv = sums[i][0], sums[j][1], sums[j][2]
            kernel.backward(queries, key, value, work, scoring, dq, dk, dv)
    parts = [[results[i][0], *sums[i]] for i in range(2)]
    results_of_all = []
    for first, second in zip(*parts, strict=True):
        results_of_all.append(torch.cat([first[:rows], second, first[rows:]]).to(q.dtype))
    return results_of_all


def _rows(x: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
    return torch.cat([x[span.start : span.start + span.length] for span in spans])


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, seen: torch.Tensor
) -> list[torch.Tensor]:
    """Return out, dq, dk, dv of dense attention, in float64, from the formulas of attention.

    The function shares no code with the kernels. It computes one head at a time. Scores are divided
    by sqrt(d).

    Args:
        q: [s, 1, h, d].
        k: [t, 1, heads, d]; heads divides h.
        v: [t, 1, heads, d].
        dout: [s, 1, h, d].
        seen: bool [s, t], visible pairs, at least one per row.
    """
    results = [torch.zeros(x.shape, dtype=torch.float64, device=q.device) for x in (q, q, k, v)]
    out, dq, dk, dv = results
    scale, group = q.shape[-1] ** -0.5, q.shape[2] // k.shape[2]
    for head in range(q.shape[2]):
        shared = head // group
        query, upper = q[:, 0, head].double(), dout[:, 0, head].double()
        keys, values = k[:, 0, shared].double(), v[:, 0, shared].double()
        p = (query @ keys.T * scale).masked_fill(~seen, -math.inf).softmax(dim=1)
        out[:, 0, head] = p @ values
        delta = (upper * out[:, 0, head]).sum(1, keepdim=True)
        ds = p * (upper @ values.T - delta) * scale
        dq[:, 0, head] = ds @ keys
        dk[:, 0, shared] += ds.T @ query
        dv[:, 0, shared] += p.T @ upper
    return results

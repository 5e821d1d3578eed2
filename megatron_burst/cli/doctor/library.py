# SPDX-License-Identifier: Apache-2.0
"""Check of the compiled library of `csrc/` and of its operators on this machine's devices.

Each operator runs on a small input and is compared with its formula in float64. This also detects a
library that was not compiled for this GPU.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator

import torch

from ...kernels import native
from .kernels import error
from .report import Finding, absent, note, ok, problem

FIX = "python setup.py build_csrc, or remove the file"
TOLERANCE = 1e-5  # relative, for float32


def library() -> Iterator[Finding]:
    """Yield one finding if no library can be used, otherwise one finding per device."""
    with warnings.catch_warnings(record=True) as complaints:
        warnings.simplefilter("always")
        devices = native.load.__wrapped__(native.FILE)  # without the cache, to get the warning
    if complaints:
        yield problem("csrc", str(complaints[0].message), FIX)
    elif not devices:
        yield absent("csrc", "not built, and not needed: torch's operators are used")
    for device in sorted(devices):
        if device == "cpu" or torch.cuda.is_available():
            yield _device_finding(device)
    if "cuda" not in devices and devices and torch.cuda.is_available():
        yield note("csrc on cuda", "built without CUDA: torch's operators are used")


def _device_finding(device: str) -> Finding:
    topic = f"csrc on {device}"
    try:
        wrong = [name for name, worst in _errors(torch.device(device)) if worst > TOLERANCE]
    except RuntimeError as error:
        return problem(topic, str(error).splitlines()[0], FIX)
    if wrong:
        return problem(topic, f"wrong results: {', '.join(wrong)}", FIX)
    return ok(topic, "operators are used and correct")


def _errors(device: torch.device) -> Iterator[tuple[str, float]]:
    """Yield (name, largest relative error) of each operator; inf if the operator did not run."""
    generator = torch.Generator().manual_seed(0)
    x, y, z = torch.randn(3, 16, 1, 2, 64, generator=generator).to(device)
    lse, other_lse = x[..., 0].clone(), y[..., 0].clone()
    total = torch.logaddexp(lse.double(), other_lse.double())
    shares = (torch.stack([lse, other_lse]).double() - total).exp()
    merged = (shares[..., None] * torch.stack([x, y])).sum(0)
    delta = (x.double() * y.double()).sum(-1)
    rows, ones = z.reshape(32, 64).clone(), torch.ones(32, device=device)
    labels, level = torch.arange(32, device=device), rows.logsumexp(1)
    softmax = rows.double().softmax(1) - torch.eye(32, 64, device=device)

    yield "delta", _worst(native.delta(x, y, torch.float32), delta)
    made = native.stand_in(y, delta.float())
    yield "stand_in", _worst(None if made is None else (made.double() * y).sum(-1), delta)
    gradient = native.LogitGradient(labels, level, ones, -ones, 0 * ones)
    done = native.softmax_gradient_(rows, gradient, 64, 1.0, None)
    yield "softmax_gradient_", _worst(rows if done else None, softmax)
    done = native.merge_(x, lse, y, other_lse)
    yield "merge_", max(_worst(x if done else None, merged), _worst(lse, total))


def _worst(result: torch.Tensor | None, exact: torch.Tensor) -> float:
    return math.inf if result is None else error(result, exact)

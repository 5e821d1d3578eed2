"""The local attention on one device: one protocol, one table.

A kernel computes one pair of shards, given as spans of positions and a mask. It must not know
ranks, schedules or communication. `TABLE` is the only list of kernels; `make` turns a name
into one that can serve the given device, and refuses the rest.

Shape letters: s query rows, t key rows, b batch, h query heads, k key/value heads (k divides h),
d width of queries and keys, w width of values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ..layout import Span
from ..masks import Causal, Mask
from . import flash
from .aten import AtenKernel
from .operators import CpuFlash, CudaCudnn, CudaFlash, prefers_cudnn
from .reference import ReferenceKernel
from .triton_kernel import TritonKernel


class Rows(NamedTuple):
    """A query chunk in backward. `out` is None where the queries are visiting: it did not travel.

    q [s, b, h, d]; dout [s, b, h, w]; lse, delta [s, b, h] in the accumulation dtype: the
    log-sum-exp over the whole sequence and delta = rowsum(dout * out); out [s, b, h, w] or None.
    """

    q: torch.Tensor
    dout: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor
    out: torch.Tensor | None = None


class Scoring(NamedTuple):
    """How a query and a key make a score: t = scale * q.k, or cap * tanh(t / cap)."""

    scale: float
    softcap: float | None = None


class Kernel(Protocol):
    name: str
    softcaps: bool  # does it know softcap?
    deterministic: bool  # the same bits every time, if torch.use_deterministic_algorithms asks

    def refusal(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
        """Why these tensors cannot be served, or None. Only shape, dtype and device are read."""
        ...

    def plan(self, mask: Mask, q_spans: Sequence[Span], k_spans: Sequence[Span]) -> Any:
        """What `forward` and `backward` need to know of a pair; None if nothing is visible."""
        ...

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        work: Any,
        scoring: Scoring,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Merge this pair's result into out [s, b, h, w] and lse [s, b, h], both in the
        accumulation dtype, by online softmax: a row that saw nothing yet has out 0, lse -inf."""
        ...

    def backward(
        self,
        rows: Rows,
        k: torch.Tensor,
        v: torch.Tensor,
        work: Any,
        scoring: Scoring,
        dq: torch.Tensor | None,
        dk: torch.Tensor | None,
        dv: torch.Tensor | None,
    ) -> None:
        """Add this pair's gradients to dq [s, b, h, d], dk [t, b, k, d], dv [t, b, k, w].

        None stands for a gradient nobody wants.
        """
        ...


def _aten(device: torch.device) -> Kernel:
    return AtenKernel("aten", CudaFlash() if device.type == "cuda" else CpuFlash())


TABLE: dict[str, Callable[[torch.device], Kernel]] = {
    "aten": _aten,
    "aten_cudnn": lambda device: AtenKernel("aten_cudnn", CudaCudnn()),
    "flash2": lambda device: flash.kernel("flash2"),
    "flash3": lambda device: flash.kernel("flash3"),
    "flash4": lambda device: flash.kernel("flash4"),
    "reference": lambda device: ReferenceKernel(),
    "triton": lambda device: TritonKernel(),
}


def automatic(device: torch.device, mask: Mask) -> tuple[str, ...]:
    """What "auto" tries, in this order: torch's own operators where few of their tiles show what
    the mask shows, for they are everywhere and fast; else ours, which takes any mask in one
    launch, as it takes what they do not (a softcap). cuDNN compiles for every shape, so it is not
    for masks that have others in every batch."""
    if not mask.stairs:
        return ("triton", "aten") if device.type == "cuda" else ("aten", "triton")
    cudnn = device.type == "cuda" and mask.lasting and prefers_cudnn(device)
    return ("aten_cudnn", "aten", "triton") if cudnn else ("aten", "triton")


def make(
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softcap: float | None = None,
    mask: Mask | None = None,
) -> Kernel:
    """The kernel called `name` for tensors like q, k, v; "auto": the first of `automatic` that
    can, for this mask (default: causal).

    Raises ValueError if there is no such kernel or it cannot serve these tensors.
    """
    if not isinstance(name, str) or (name != "auto" and name not in TABLE):
        raise ValueError(f"kernel must be one of auto, {', '.join(TABLE)}, got {name!r}")
    reasons = []
    names = (name,) if name != "auto" else automatic(q.device, Causal() if mask is None else mask)
    for each in names:
        kernel = TABLE[each](q.device)
        reason = _refusal(kernel, q, k, v, softcap)
        if reason is None:
            return kernel
        reasons.append(f"kernel {each} {reason}")
    raise ValueError("; ".join([*reasons, "kernel='reference' takes anything"]))


def _refusal(
    kernel: Kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softcap: float | None
) -> str | None:
    if torch.are_deterministic_algorithms_enabled() and not kernel.deterministic:
        return "is not deterministic, and torch.use_deterministic_algorithms(True) was called"
    if softcap is not None and not kernel.softcaps:
        return f"has no softcap, got softcap={softcap}"
    return kernel.refusal(q, k, v)

# SPDX-License-Identifier: Apache-2.0
"""The protocol of kernels: the local attention of one pair of shards on one device.

A pair is given as spans of positions and a mask, so that one kernel serves every layout, schedule
and side.

Shape letters: s query rows, t key rows, b batch, h query heads, k key/value heads (k divides h),
d width of queries and keys, w width of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ..layout import Span
from ..masks import Mask


class Rows(NamedTuple):
    """A query chunk in backward. `out` is None where the queries travel: the output does not.

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
    """The local attention on one device.

    name: its entry in `registry.KERNELS`. softcaps: does it take a softcap? maximum: can its
    forward tell the largest scores? deterministic: does it return the same bits every time where
    torch.use_deterministic_algorithms asks for that? passed_over: what kernel "auto" would rather
    have taken, and why not, one sentence each.
    """

    name: str
    passed_over: tuple[str, ...]
    softcaps: bool
    maximum: bool
    deterministic: bool

    def refusal(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
        """Why these tensors cannot be served, or None. Only shape, dtype and device are read."""
        ...

    def work_for(self, mask: Mask, q_spans: Sequence[Span], k_spans: Sequence[Span]) -> Any:
        """What `forward` and `backward` need of a pair of shards besides tensors, made once per
        plan; None if nothing is visible. Raises ValueError for a mask the kernel cannot compute.
        """
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
        max_logits: torch.Tensor | None = None,
    ) -> None:
        """Merge this pair's result into out [s, b, h, w] and lse [s, b, h], both in the
        accumulation dtype, by online softmax: a row that saw nothing yet has out 0, lse -inf.

        max_logits [h], of the same dtype, or None, which kernels without `maximum` need: raised to
        the largest score that a row of each head sees.
        """
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

        None stands for a gradient that is not needed.
        """
        ...

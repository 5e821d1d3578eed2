# SPDX-License-Identifier: Apache-2.0
"""Interface of kernels: local attention of one pair of shards on one device.

A pair is described by spans of positions and a mask, so a kernel does not depend on layout,
schedule and side.

Shape letters: s query rows, t key rows, b batch, h query heads, k key/value heads (k divides h), d
width of queries and keys, w width of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ..layout import Span
from ..masks import Mask


class Rows(NamedTuple):
    """A query chunk in backward.

    Attributes:
        q: [s, b, h, d].
        dout: [s, b, h, w].
        lse: [s, b, h] in the accumulation dtype: log-sum-exp over the whole sequence.
        delta: [s, b, h] in the accumulation dtype: rowsum(dout * out).
        out: [s, b, h, w]; None for a received query chunk, because the output is not sent.
    """

    q: torch.Tensor
    dout: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor
    out: torch.Tensor | None = None


class Scoring(NamedTuple):
    """The score of a query and a key: t = scale * q.k, or cap * tanh(t / cap) with a softcap."""

    scale: float
    softcap: float | None = None


class Kernel(Protocol):
    """Local attention on one device.

    Attributes:
        name: Name in `registry.KERNELS`.
        passed_over: For each kernel that "auto" prefers to this kernel, the reason why it was not
            chosen.
        softcaps: True if the kernel supports a softcap.
        maximum: True if `forward` can return the largest scores.
        deterministic: True if results are bitwise reproducible with
            torch.use_deterministic_algorithms.
    """

    name: str
    passed_over: tuple[str, ...]
    softcaps: bool
    maximum: bool
    deterministic: bool

    def refusal(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
        """Return why shape, dtype or device of the tensors are not supported; None if they are."""
        ...

    def work_for(self, mask: Mask, q_spans: Sequence[Span], k_spans: Sequence[Span]) -> Any:
        """Plan `forward` and `backward` for a pair of shards. Called once per plan.

        The result is passed to `forward` and `backward` as `work`. The result is None if no query
        sees a key.

        Raises:
            ValueError: The kernel does not support the mask.
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
        """Merge the result of this pair into out and lse by online softmax.

        Args:
            q: [s, b, h, d].
            k: [t, b, k, d].
            v: [t, b, k, w].
            work: From `work_for`.
            scoring: Scale and softcap.
            out: [s, b, h, w] in the accumulation dtype, 0 in rows that attended to no key so far.
            lse: [s, b, h] in the accumulation dtype, -inf in rows that attended to no key so far.
            max_logits: [h] in the accumulation dtype, updated in place to the largest visible score
                of each head. None if the kernel has no `maximum`.
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
        """Add the gradients of this pair to dq, dk and dv.

        Args:
            rows: The query chunk.
            k: [t, b, k, d].
            v: [t, b, k, w].
            work: From `work_for`.
            scoring: Scale and softcap.
            dq: [s, b, h, d], or None if not needed.
            dk: [t, b, k, d], or None if not needed.
            dv: [t, b, k, w], or None if not needed.
        """
        ...

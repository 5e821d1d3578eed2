# SPDX-License-Identifier: Apache-2.0
"""Interface of kernels: local attention of one pair of shards on one device.

A pair of shards consists of a shard of queries and a shard of keys and values. Spans of positions
and a mask describe the pair. So a kernel does not depend on the layout, the schedule or the side
(the tensors that backward sends).

Shape letters: s query rows, t key rows, b batch, h query heads, k key/value heads (k divides h), d
width of queries and keys, w width of values.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from ..layout.layouts import ShardPairs
from ..masks import Mask


class Rows(NamedTuple):
    """The tensors of a query chunk in backward.

    Attributes:
        q: [s, b, h, d].
        dout: [s, b, h, w].
        lse: [s, b, h] in the accumulation dtype: log-sum-exp over the whole sequence.
        delta: [s, b, h] in the accumulation dtype: rowsum(dout * out).
        out: [s, b, h, w]; None for a received query chunk, because outputs are not sent.
    """

    q: torch.Tensor
    dout: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor
    out: torch.Tensor | None = None


class Scoring(NamedTuple):
    """Scale and softcap of scores.

    A score is t = scale * q.k, or with a softcap cap * tanh(t / cap).
    """

    scale: float
    softcap: float | None = None


class Kernel(Protocol):
    """Local attention on one device.

    Attributes:
        name: Name in `registry.KERNELS`.
        passed_over: Texts for the log: why "auto" did not select the kernels that it prefers to
            this one, and why it cannot call this kernel in a faster way.
        softcaps: True if the kernel supports a softcap.
        maximum: True if `forward` can return the largest score of each head.
        deterministic: True if results are bitwise reproducible with
            torch.use_deterministic_algorithms.
    """

    name: str
    passed_over: tuple[str, ...]
    softcaps: bool
    maximum: bool
    deterministic: bool

    def refusal(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
        """Return why the kernel does not support these tensors; None if it does."""
        ...

    def works_for(self, mask: Mask, pairs: ShardPairs) -> list[Any]:
        """Prepare `forward` and `backward` for all pairs of shards of a plan.

        Args:
            mask: The mask.
            pairs: Query spans and key spans of each pair of shards.

        Returns:
            The argument `work` of `forward` and `backward`, for each pair; None if no query of the
            pair sees a key.

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
        """Compute attention of the pair, and merge it into out and lse by online softmax.

        Args:
            q: [s, b, h, d].
            k: [t, b, k, d].
            v: [t, b, k, w].
            work: Result of `works_for` for the pair.
            scoring: Scale and softcap.
            out: [s, b, h, w] in the accumulation dtype, 0 in rows that attended to no key so far.
            lse: [s, b, h] in the accumulation dtype, -inf in rows that attended to no key so far.
            max_logits: [h] in the accumulation dtype. Each entry is raised to the largest visible
                score of its head. None if the caller needs no largest scores.
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
            work: Result of `works_for` for the pair.
            scoring: Scale and softcap.
            dq: [s, b, h, d], or None if not needed.
            dk: [t, b, k, d], or None if not needed.
            dv: [t, b, k, w], or None if not needed.
        """
        ...


class WritingKernel(Kernel, Protocol):
    """A kernel that can write the first results into tensors whose content is undefined.

    Clearing tensors and then adding to them would write them twice and read them once more. A
    kernel with these methods has the attribute `writes_new` = True.
    """

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
        *,
        new: bool = False,
    ) -> None:
        """Same as `Kernel.forward`; if `new`, write all rows of out and lse instead of merging."""
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
        *,
        new: tuple[bool, bool, bool] = (False, False, False),
    ) -> None:
        """Same as `Kernel.backward`; write all rows of each of dq, dk and dv that is `new`."""
        ...

# SPDX-License-Identifier: Apache-2.0
"""Choice of the algorithm of a sparse operation that is called with algorithm "auto".

The cost model of attention predicts the time of each algorithm from the number of selected
query-key pairs and the measured speed of the sparse kernel. This module imports the simulator.
Therefore it is imported only if a call uses "auto", like `planning.automatic`.

Shape letters: s query rows, t key rows, b batch, h heads, d width, w value width.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from ...autotune.candidates import FixedSettings, Workload
from ...autotune.rates import Rates
from ...comm.consensus import attempt
from ...comm.groups import Groups
from ...kernels.base import Rows, Scoring
from ...kernels.online_softmax import accumulation_dtype
from ...layout import Replicated, Span
from ...layout.layouts import ShardPairs
from ...masks import Causal, Mask
from ...planning.automatic import fastest, rates_of
from ...planning.validate import Request
from .pairs import PairKernel, SelectedPairs
from .rules import SelectionRule, described, parts_per_unit
from .selection import selected
from .top_k import no_units


def chosen(request: Request, groups: Groups) -> Request | ValueError:
    """Return the checked arguments with the algorithm that is predicted to be the fastest.

    If the prediction fails on this rank, return the error instead. This is a collective call. It
    measures the rates of the links and of the kernel if they are not cached.
    """
    kernel, (q, k, v) = request.kernel, request.tensors
    assert isinstance(kernel, PairKernel)
    # Time the heads of one row instead of the heads of all rows of a unit; the speed is the same.
    if kernel.of is not None:
        q = q[:, :, : q.shape[2] // kernel.of.block]
    if kernel.latent:  # whole keys: value columns and key columns
        q, k = (torch.empty_like(t[..., :1]).expand(*t.shape[:3], t.shape[3] + v.shape[3])
                for t in (q, k))  # fmt: skip
    trial: Any = _TimedPair(kernel)
    with groups.running():
        rates = rates_of(replace(request, kernel=trial, tensors=(q, k, v)), groups, None)
    return attempt(with_fastest, request, groups, rates)


def with_fastest(request: Request, groups: Groups, rates: Rates) -> Request:
    """Return the checked arguments with the algorithm that is the fastest at these rates."""
    kernel = request.kernel
    assert isinstance(kernel, PairKernel)
    key_layout = request.key_layout
    assert not isinstance(key_layout, Replicated)
    workload = Workload(
        request.sizes, request.mask, request.layout, latent=kernel.latent,
        attended=kernel.attended or request.key_len, key_layout=key_layout,
        streams=request.relay_stream,
    )  # fmt: skip
    choice = fastest(workload, FixedSettings(side="kv", head_chunks=1), groups, rates)
    algorithm = choice.taken.algorithm
    options = replace(request.options, algorithm=algorithm)
    facts = request.facts | {"algorithm": algorithm}
    return replace(request, options=options, facts=facts, choice=choice)


class _TimedPair:
    """Adapter with the interface of an attention kernel, to measure the speed of a sparse kernel.

    In the measured calls each query selects all keys.
    """

    def __init__(self, of: PairKernel):
        self.by, self.rule, self.latent = of.by, of.of, of.latent
        self.heads, self.top_k = of.heads, of.top_k
        rule = self.rule and described(self.rule)
        self.name = f"{self.by.__name__} {rule} {self.heads} {self.top_k} {self.latent}"

    def works_for(self, mask: Mask, pairs: ShardPairs) -> list[SelectedPairs]:
        lengths = [k_spans[0].length for _, k_spans in pairs]
        return [
            SelectedPairs(Causal(), [Span(rows, 1, rows)], [Span(0, 1, rows)]) for rows in lengths
        ]

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, work: SelectedPairs,
        scoring: Scoring, out: torch.Tensor, lse: torch.Tensor,
    ) -> None:  # fmt: skip
        if self.rule is not None:
            self._score(self.rule, q, k, work)
        else:
            kernel, own = self._attention(q, work), v.shape[3] * self.latent
            kernel.forward(q, k[..., own:], v, work, scoring, out, lse)

    def backward(
        self, rows: Rows, k: torch.Tensor, v: torch.Tensor, work: SelectedPairs, scoring: Scoring,
        dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor,
    ) -> None:  # fmt: skip
        if self.rule is not None:
            # Scores have no backward. This is the amount of work that the cost model counts.
            for q in (rows.q, rows.q, rows.q[: len(k) // 2]):
                self._score(self.rule, q, k, work)
        else:
            kernel, own = self._attention(rows.q, work), v.shape[3] * self.latent
            kernel.backward(rows, k[..., own:], v, work, scoring, dq, dk[..., own:], dv)

    def _attention(self, q: torch.Tensor, work: SelectedPairs) -> Any:
        ids = torch.arange(len(work.keys), dtype=torch.int32, device=q.device)
        ids = ids.expand(*q.shape[:2], self.heads, -1)
        layout: Any = None  # the kernel does not read the layout
        return self.by(selected(ids, layout, Causal()), self.latent)

    def _score(
        self, rule: SelectionRule, q: torch.Tensor, k: torch.Tensor, work: SelectedPairs
    ) -> None:
        wide = q.new_empty(0, dtype=accumulation_dtype(q.dtype))
        best = no_units((*q.shape[:2], self.heads, self.top_k), wide)
        weights = q[..., 0] if rule.weighted else None
        call: Any = SimpleNamespace(work=work)
        q = q[..., : q.shape[3] // parts_per_unit(rule)]
        self.by(rule, q, weights, *best).pair(call, (), (k,), ())

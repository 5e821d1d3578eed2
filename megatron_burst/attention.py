# SPDX-License-Identifier: Apache-2.0
"""The public operation: exact attention over a sequence that is split over ranks.

Finds or makes the plan of a call, and hands it to autograd. What is refused is
`planning.validate`'s; how a rank runs its part is in `execution`.

Shape letters: s local rows, b batch, h query heads, k key/value heads, d width, w value width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from typing_extensions import Unpack

from .comm.groups import Groups
from .execution.function import Attention, AttentionRun
from .kernels.autograd import outside_graphs, refuse_transforms
from .options import AttentionKeywords
from .planning.plan import Plan
from .planning.prepare import prepare
from .planning.validate import NeedsGrad
from .recompute.checkpoint import current_store

if TYPE_CHECKING:
    from .autotune.rates import Rates


@outside_graphs
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    plan: Plan | None = None,
    sink: torch.Tensor | None = None,
    max_logits: torch.Tensor | None = None,
    label: object = None,
    groups: Groups | None = None,
    needs_grad: NeedsGrad | None = None,
    rates: Rates | None = None,
    **options: Unpack[AttentionKeywords],
) -> torch.Tensor:
    """Exact attention over a sequence that is split over ranks.

    q [s, b, h, d]; k [s, b, k, d]; v [s, b, k, w]: this rank's shard, s rows of the positions
    that `layout` gives it; k divides h. Returns out [s, b, h, w] in the dtype of q.

    sink: [h], a learnable logit per head in every softmax (zeros: "off by one" softmax); its
    gradient is that of this rank's rows. max_logits: [h], raised in place to the largest score of
    each head in what this rank computes (take the maximum over ranks), in the accumulation dtype
    (float32, for float64 tensors float64), from -inf or earlier results; without gradient, without
    the sink. label: a string, an integer or a tuple of them, such as the number of the layer, by
    which ranks out of step are noticed.

    Either `plan`, made by `mb.prepare`, or the keywords from which `prepare` makes one, which is a
    collective: groups, needs_grad, rates (what they do not state is measured, once per groups, for
    algorithm "auto"), and options, the fields of `AttentionOptions`, which says what they mean.

    Cannot be differentiated twice, nor run inside torch.func; torch.compile breaks its graph here,
    once. Raises ValueError for unsupported arguments, RuntimeError naming the exchange if a peer
    died or is out of step.
    """
    refuse_transforms("mb.attention")
    store = current_store()
    if plan is None:
        if store is not None:
            options.setdefault("store", store.fraction)
        plan = prepare(
            q, k, v, groups=groups, needs_grad=needs_grad, sink=sink, max_logits=max_logits,
            rates=rates, **options,
        )  # fmt: skip
    else:
        keywords = {"groups": groups, "needs_grad": needs_grad, "rates": rates, **options}
        given = sorted(name for name, value in keywords.items() if value is not None)
        if given:
            raise ValueError(f"plan: give a plan or its keywords, not both; got {given}")
    if not isinstance(plan, Plan):
        raise ValueError(f"plan must be made by mb.prepare, got {plan!r:.100}")
    plan.groups.check()
    plan.check(q, k, v, sink, max_logits)
    kept = plan.keeps(store, label)  # before the call counts: it may be refused
    call = AttentionRun(
        operation="mb.attention",
        groups=plan.groups,
        job=plan.job,
        tag=plan.groups.calls.forward(plan.identity, label, sink is not None),
        kept=kept,
        max_logits=max_logits,
    )
    return Attention.apply(call, sink, q, k, v)  # pyright: ignore[reportReturnType]

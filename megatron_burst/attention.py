# SPDX-License-Identifier: Apache-2.0
"""`mb.attention`: exact attention over a sequence that is split over ranks.

The function makes a plan, unless the caller passes one from `mb.prepare`, and calls the autograd
function. `planning.validate` checks the arguments. `execution` computes the attention of one rank.

Shape letters: s local rows, b batch, h query heads, k key/value heads, d width, w value width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from typing_extensions import Unpack

from .comm.groups import Groups
from .execution.function import Attention, RankCall
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
    """Compute exact attention over a sequence that is split over ranks.

    Every rank of `groups` calls the function with its own shard. Forward and backward both
    communicate. Double backward is not supported. torch.compile breaks the graph at this call.

    The call uses `plan`, or makes a plan from `groups`, `needs_grad`, `rates` and `options`. Making
    a plan is a collective call; see `mb.prepare`.

    Args:
        q: Queries of this rank, [s, b, h, d], in float64, float32, bfloat16 or float16. `layout`
            defines the positions of the s rows.
        k: Keys of this rank, [s, b, k, d], with the dtype and device of q. k divides h.
        v: Values of this rank, [s, b, k, w], with the dtype and device of q.
        plan: Plan that `mb.prepare` made for tensors of these shapes. Cannot be combined with
            `groups`, `needs_grad`, `rates` or `options`.
        sink: [h], a learnable logit per query head that is added to the softmax of every row. Zeros
            give "off by one" softmax. Its gradient covers the rows of this rank only. Default: no
            sink.
        max_logits: [h], contiguous, without gradient, in the accumulation dtype (float32; float64
            for float64 tensors). Updated in place to the largest score per head that this rank
            computes, without the sink, if that is larger. Fill it with -inf or with earlier
            results, and compute the maximum over ranks afterwards.
        label: A string, an integer or a tuple of them that identifies the call, such as the number
            of the layer. Ranks compare labels to detect calls in a different order. Default: file
            and line of the calling code.
        groups: Ranks over which the sequence is split. Required without `plan`.
        needs_grad: Three booleans: whether q, k and v need a gradient. Default: `requires_grad` of
            q, k and v.
        rates: Link and compute rates for algorithm "auto". Default: measured once per `groups`.
        **options: Fields of `mb.options.AttentionOptions`.

    Returns:
        Attention output of this rank, [s, b, h, w], in the dtype of q.

    Raises:
        ValueError: An argument is not supported, does not fit the plan, or differs between ranks;
            or the call is inside torch.func.
        RuntimeError: A rank died, or makes a different call. The message names the exchange.

    Source: BurstEngine (arXiv 2509.19836), Algorithms 1 and 2.

    Example:
        >>> import torch
        >>> import megatron_burst as mb
        >>> q, k, v = (torch.randn(128, 1, heads, 64) for heads in (8, 2, 2))
        >>> out = mb.attention(q, k, v, groups=mb.Groups.single(), layout="contiguous")
        >>> out.shape
        torch.Size([128, 1, 8, 64])
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
        conflicting = sorted(name for name, value in keywords.items() if value is not None)
        if conflicting:
            raise ValueError(
                f"plan cannot be combined with {conflicting}; pass a plan, or the keywords that "
                "make one"
            )
    if not isinstance(plan, Plan):
        raise ValueError(f"plan must be made by mb.prepare, got {plan!r:.100}")
    plan.groups.check()
    plan.check(q, k, v, sink, max_logits)
    store_entry = plan.store_entry(store, label)  # may raise, so before the call is counted
    call = RankCall(
        operation="mb.attention",
        groups=plan.groups,
        rank_plan=plan.rank_plan,
        tag=plan.groups.calls.forward(plan.identity, label, sink is not None),
        store_entry=store_entry,
        max_logits=max_logits,
    )
    return Attention.apply(call, sink, q, k, v)  # pyright: ignore[reportReturnType]

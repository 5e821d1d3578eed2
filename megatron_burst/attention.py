# SPDX-License-Identifier: Apache-2.0
"""`mb.attention` and `mb.joint_attention`: exact attention over sequences split over ranks.

`attention` makes a plan, unless the caller passes one from `mb.prepare`, and calls the autograd
function. `joint_attention` computes one softmax over several sets of keys, with a plan for each.
`planning.validate` checks the arguments. `execution` computes the attention of one rank.

Shape letters: s local rows, b batch, h query heads, k key/value heads, d width, w value width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import Unpack

from .comm.groups import Groups
from .execution.function import Attention, RankCall, StoredResults
from .execution.joint import JointAttention
from .kernels.autograd import outside_graphs, refuse_transforms
from .options import AttentionKeywords
from .planning.plan import Plan
from .planning.prepare import prepare
from .planning.validate import NeedsGrad
from .recompute.checkpoint import AttentionStore, current_store

if TYPE_CHECKING:
    from .autotune.rates import Rates


@outside_graphs
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
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
        k: Keys of this rank, [s, b, k, d], with the dtype and device of q; k divides h. With option
            `key_layout`, [t, b, k, d] with t key rows.
        v: Values of this rank, [s, b, k, w] or [t, b, k, w], with the dtype and device of q. None:
            values are the keys, which are then sent once.
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
        needs_grad: Three booleans: whether q, k and v need a gradient. The third is ignored if
            v is None. Default: `requires_grad` of q, k and v.
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
    return Attention.apply(call, sink, q, k, *(() if v is None else (v,)))  # pyright: ignore[reportReturnType]


@outside_graphs
def joint_attention(
    q: torch.Tensor,
    key_sets: Sequence[tuple[torch.Tensor, torch.Tensor | None, Plan]],
    *,
    sink: torch.Tensor | None = None,
    max_logits: torch.Tensor | None = None,
    label: object = None,
    return_lse: bool = False,
) -> Any:
    """Compute attention with one softmax over several sets of keys.

    Example: the keys of a window, and compressed keys of the whole sequence. Each set has a plan
    with its own layout, mask, algorithm and kernel. The result equals attention over the union of
    the sets. Forward and backward both communicate. Double backward is not supported.

    Args:
        q: Queries of this rank, [s, b, h, d].
        key_sets: Tuples (k, v, plan), at least one: keys [t, b, k, d] and values [t, b, k, w] of
            this rank, and a plan of `mb.prepare(q, k, v, ...)`. t and k may differ between sets.
            v is None if values are the keys.
        sink: [h], a logit that is added once to the softmax of every row, as in `mb.attention`.
        max_logits: [h], updated in place to the largest score of each head over all sets, as in
            `mb.attention`.
        label: Same as in `mb.attention`.
        return_lse: Also return the log-sum-exp.

    Returns:
        Attention output of this rank, [s, b, h, w], in the dtype of q. With `return_lse` a pair of
        the output and lse [s, b, h], the log-sum-exp of each row's scores and sink, in float32
        (float64 for float64 tensors), without a gradient.

    Raises:
        ValueError: An argument is not supported, does not fit its plan, or plans do not fit each
            other; or a checkpoint around the call keeps a part of the attention outputs.
        RuntimeError: A rank died, or makes a different call. The message names the exchange.

    Example:
        >>> import torch
        >>> import megatron_burst as mb
        >>> q, k, v = torch.randn(3, 128, 1, 8, 64).unbind()
        >>> pooled = [x.unflatten(0, (32, 4)).mean(1) for x in (k, v)]
        >>> groups = mb.Groups.single()
        >>> window_plan = mb.prepare(q, k, v, groups=groups, mask=mb.masks.Window(15, 0))
        >>> pooled_plan = mb.prepare(q, *pooled, groups=groups, mask=mb.masks.Compressed(4),
        ...                          key_layout="contiguous")
        >>> mb.joint_attention(q, [(k, v, window_plan), (*pooled, pooled_plan)]).shape
        torch.Size([128, 1, 8, 64])
    """
    refuse_transforms("mb.joint_attention")
    store = current_store()
    if store is not None and store.fraction not in (None, 0.0, 1.0):
        raise ValueError(
            "keep: joint attention keeps the results of all rows or of none for recomputation, and "
            f"the checkpoint around this call keeps {store.fraction}; use mb.checkpoint(..., "
            "keep=1.0) or keep=0.0"
        )
    plans = _check_key_sets(q, key_sets, sink, max_logits)
    plans[0].groups.check()
    if return_lse and len(plans[0].rank_plan.ulysses_links) > 1:
        raise ValueError(
            "return_lse: a rank has lse for only its share of the heads, got groups with ulysses="
            f"{plans[0].groups.topology.ulysses}; use groups with ulysses=1"
        )
    store_entry = _joint_store_entry(store, plans, label)  # may raise, so before calls are counted
    calls = [
        RankCall(
            operation="mb.joint_attention",
            groups=plan.groups,
            rank_plan=plan.rank_plan,
            tag=plan.groups.calls.forward(
                plan.identity, _label_of_set(label, number), sink is not None
            ),
            store_entry=store_entry,
            max_logits=max_logits,
            return_lse=return_lse,
        )
        for number, plan in enumerate(plans)
    ]
    keys = [tensor for k, v, _ in key_sets for tensor in (k, v) if tensor is not None]
    return JointAttention.apply(tuple(calls), sink, q, *keys)


def _label_of_set(label: object, number: int) -> object:
    """Return the label under which the call over key set `number` (from 0) is compared."""
    if label is None:
        return ("key set", number) if number else None
    return (*label, number) if isinstance(label, tuple) else (label, number)


def _joint_store_entry(
    store: AttentionStore | None, plans: Sequence[Plan], label: object
) -> StoredResults | None:
    """Return the entry of a joint call in the store of a checkpoint; None if nothing is kept."""
    entry = plans[0].store_entry(store, label)
    if entry is None:
        return None
    return StoredResults(entry.store, ("joint", *(plan.call for plan in plans), label))


def _check_key_sets(
    q: torch.Tensor,
    key_sets: Sequence[tuple[torch.Tensor, torch.Tensor | None, Plan]],
    sink: torch.Tensor | None,
    max_logits: torch.Tensor | None,
) -> list[Plan]:
    """Check the arguments of `joint_attention`, and return the plan of each set of keys.

    Raises:
        ValueError: An argument is not supported.
    """
    if not isinstance(key_sets, (list, tuple)) or not key_sets:
        raise ValueError(f"key_sets must be a list of tuples (k, v, plan), got {key_sets!r:.100}")
    plans: list[Plan] = []
    for number, key_set in enumerate(key_sets):
        name = f"key_sets[{number}]"
        if not isinstance(key_set, (list, tuple)) or len(key_set) != 3:
            raise ValueError(f"{name} must be a tuple (k, v, plan), got {key_set!r:.100}")
        k, v, plan = key_set
        if not isinstance(plan, Plan):
            raise ValueError(f"{name}: plan must be made by mb.prepare, got {plan!r:.100}")
        try:
            plan.check(q, k, v, sink, max_logits)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        plans.append(plan)
        for reason in _misfits(plan, plans[0]):
            raise ValueError(f"{name}: {reason}")
        width, expected = (p.signature[2][0][-1] for p in (plan, plans[0]))
        if width != expected:
            raise ValueError(
                f"{name}: values must have the width of the first set, {expected}, got {width}"
            )
    return plans


def _misfits(plan: Plan, first: Plan) -> Iterator[str]:
    """Yield the reasons why `plan` cannot be used in a joint call whose first plan is `first`."""
    if plan.options.sequence_chunks > 1:
        yield (
            "joint attention has no row chunks, and the plan was made with sequence_chunks="
            f"{plan.options.sequence_chunks}; use 1"
        )
    if plan.options.store not in (None, 1.0):
        yield (
            "joint attention keeps the results of all rows or of none for recomputation, and the "
            f"plan was made with store={plan.options.store}; use store=1.0 or store=None"
        )
    if plan.options.store != first.options.store:
        yield f"store must be equal in all plans, {first.options.store}, got {plan.options.store}"
    if plan.groups is not first.groups:
        yield "all plans must be made with the same groups"
    if plan.layout != first.layout:
        yield (
            f"the layout of the queries must be equal in all plans, {first.layout!r}, got "
            f"{plan.layout!r}"
        )
    if plan.rank_plan.scoring != first.rank_plan.scoring:
        yield (
            "softmax_scale and softcap must be equal in all plans, "
            f"{tuple(first.rank_plan.scoring)}, got {tuple(plan.rank_plan.scoring)}"
        )
    if plan.needs_grad[0] != first.needs_grad[0]:
        yield "all plans must be made with the same needs_grad of q"
    shared, expected = (len(p.rank_plan.ulysses_links) for p in (plan, first))
    if shared != expected:
        yield (
            "one of this set and the first set has replicated keys, and ranks share heads only for "
            "the other set; use groups with ulysses=1, or a key_layout that splits the keys"
        )

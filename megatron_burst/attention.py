"""The public operation: exact attention over a sequence that is split over ranks.

Finds or makes the plan of a call, and hands it to autograd. What is refused is
`planning.validate`'s; how a rank runs its part is in `execution`.

Shape letters: s local rows, b batch, h query heads, k key/value heads, d width, w value width.
"""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import Unpack

from .autotune.rates import Rates
from .comm.groups import Groups, InProcessGroups
from .execution.function import Attention, InProcessAttention, Kept
from .kernels.autograd import outside_graphs, refuse_transforms
from .options import AttentionKeywords
from .planning.in_process import InProcessPlan, Shard, per_rank
from .planning.plan import Plan
from .planning.prepare import prepare
from .planning.validate import NeedsGrad, check_shapes, check_sink, signature
from .recompute.checkpoint import Frame, current


@outside_graphs
def attention(
    q: Shard,
    k: Shard,
    v: Shard,
    *,
    plan: Plan | InProcessPlan | None = None,
    sink: torch.Tensor | None = None,
    label: object = None,
    groups: Groups | InProcessGroups | None = None,
    needs_grad: NeedsGrad | None = None,
    rates: Rates | None = None,
    **options: Unpack[AttentionKeywords],
) -> Shard:
    """Exact attention of all positions to all positions the mask shows them.

    q [s, b, h, d]; k [s, b, k, d]; v [s, b, k, w]: this rank's shard, s rows of the positions
    that `layout` gives it; k divides h. Returns out [s, b, h, w] in the dtype of q. With
    `Groups.in_process` q, k, v are lists, one tensor per rank, and so is the result.

    sink: [h], a learnable logit per head that takes part in every row's softmax and has no value
    (zeros: "off by one" softmax); its gradient is that of this rank's rows.

    label: what the ranks should agree on about this call, such as the number of a layer (a string,
    an integer or a tuple of them); where ranks are out of step, it tells calls of one plan apart.

    Either `plan`, made by `mb.prepare`, or the keywords from which `prepare` makes one, which is a
    collective: groups, needs_grad, rates, and the options below.

    layout: which positions each rank holds: a name or a `Layout` (see `mb.layout`).
    mask: from `mb.masks`; default `Causal()`.
    algorithm: "burst", "double_ring", "ring", "all_gather", and with groups that share heads also
    "hybrid" (burst inside) and "ulysses"; "auto" takes the one that is predicted to be fastest,
    with its side and head_chunks, at `rates` (what they do not state is measured, once per groups).
    side: "auto" (fewer bytes), "kv" or "query".
    kernel: "auto", "aten", "aten_cudnn", "triton", "reference", or an installed FlashAttention
    package: "flash2", "flash3", "flash4".
    softmax_scale: default d ** -0.5. softcap: cap * tanh(score / cap).
    grad_wire_dtype: of travelling gradients, None for the accumulation dtype.
    kv_cache: the fraction of travelling keys that forward keeps for backward.
    store: the fraction of results that a checkpoint around the call keeps (default: as it says).
    head_chunks: into how many chunks the key/value heads (and their query heads) are cut, whose
    rings run staggered, so that the last hops of one overlap with the compute of another, at that
    many times the messages; 1: one ring.

    Cannot be differentiated twice, nor run inside torch.func; torch.compile breaks its graph here,
    once. Raises ValueError for what cannot be served, RuntimeError naming the exchange if a peer
    died or is out of step.
    """
    refuse_transforms("mb.attention")
    frame = current()
    if plan is None:
        if frame is not None:
            options.setdefault("store", frame.keep)
        plan = prepare(
            q, k, v, groups=groups, needs_grad=needs_grad, sink=sink, rates=rates, **options
        )
    else:
        _check_alone(groups=groups, needs_grad=needs_grad, rates=rates, **options)
    if isinstance(plan, InProcessPlan):
        return _in_process(plan, q, k, v, sink, label, frame)
    if not isinstance(plan, Plan):
        raise ValueError(f"plan must be made by mb.prepare, got {plan!r:.100}")
    plan.groups.check()
    _check_call(plan, q, k, v, sink)
    kept = _kept(plan, frame)  # before the call counts: it may be refused
    call = plan.groups.calls.forward(plan.identity, label, sink is not None)
    out: Any = Attention.apply(plan.job, plan.groups, call, kept, sink, q, k, v)
    return out


def _check_alone(**keywords: object) -> None:
    """Raise ValueError if a plan comes with keywords that would make one."""
    given = sorted(name for name, value in keywords.items() if value is not None)
    if given:
        raise ValueError(f"plan: give a plan or its keywords, not both; got {given}")


def _in_process(
    plan: InProcessPlan,
    q: Any,
    k: Any,
    v: Any,
    sink: torch.Tensor | None,
    label: object,
    frame: Frame | None,
) -> Any:
    """All ranks at once, in one autograd function: the backward of one waits for the others."""
    shards = per_rank(plan.groups, q, k, v)
    for one, shard in zip(plan.ranks, shards, strict=True):
        _check_call(one, *shard, sink)
    kept = _kept(plan.ranks[0], frame)
    begin = (one.groups.calls.forward for one in plan.ranks)
    calls = [each(plan.identity, label, sink is not None) for each in begin]
    jobs, flat = [one.job for one in plan.ranks], [t for shard in shards for t in shard]
    outs = InProcessAttention.apply(jobs, plan.groups, calls, kept, sink, *flat)
    return outs[0] if isinstance(q, torch.Tensor) else list(outs)


def _check_call(plan: Plan, q: Any, k: Any, v: Any, sink: torch.Tensor | None) -> None:
    """Raise ValueError unless these are tensors that the plan was made for."""
    if not all(isinstance(t, torch.Tensor) for t in (q, k, v)):
        check_shapes(q, k, v)
    if not plan.matches(q, k, v):
        raise ValueError(
            f"plan: made for {plan.signature} and gradients of (q, k, v) {plan.needs_grad}; got "
            f"{signature(q, k, v)}; call mb.prepare for these tensors"
        )
    if torch.are_deterministic_algorithms_enabled():  # perhaps not yet when the kernel was chosen
        kernel = plan.kernel
        reason = kernel.refusal(q, k, v) if kernel.deterministic else "is not deterministic"
        if reason is not None:
            raise ValueError(
                f"plan: kernel {kernel.name} {reason}, and torch.use_deterministic_algorithms("
                "True) was called; call mb.prepare again"
            )
    check_sink(sink, q)


def _kept(plan: Plan, frame: Frame | None) -> Kept | None:
    """Where the call keeps its results. ValueError if a checkpoint wants what is not planned."""
    planned = plan.recompute.keep if plan.recompute is not None else None
    if frame is None or (frame.keep is None and planned is None):
        return None
    if frame.keep not in (None, planned):
        raise ValueError(
            f"plan: made with store={planned}, and the checkpoint around this call keeps "
            f"{frame.keep}; make it with mb.prepare(..., store={frame.keep})"
        )
    return Kept(frame, plan.call)

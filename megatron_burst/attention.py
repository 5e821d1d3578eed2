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
from .execution.function import Attention, InProcessAttention
from .kernels.autograd import outside_graphs, refuse_transforms
from .options import AttentionKeywords
from .planning.in_process import InProcessPlan, Shard, per_rank
from .planning.plan import Plan
from .planning.prepare import prepare
from .planning.validate import NeedsGrad
from .recompute.checkpoint import Frame, current


@outside_graphs
def attention(
    q: Shard,
    k: Shard,
    v: Shard,
    *,
    plan: Plan | InProcessPlan | None = None,
    sink: torch.Tensor | None = None,
    max_logits: torch.Tensor | None = None,
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

    max_logits: [h], raised in place to the largest score that a query of each head sees in what
    this rank computes: the maximum over all ranks is that of the whole sequence. It has the
    accumulation dtype (float32, for float64 tensors float64), starts at -inf or at earlier results,
    and gets no gradient; a sink does not count.

    label: what the ranks should agree on about this call, such as the number of a layer (a string,
    an integer or a tuple of them); where ranks are out of step, it tells calls of one plan apart.

    Either `plan`, made by `mb.prepare`, or the keywords from which `prepare` makes one, which is a
    collective: groups, needs_grad, rates, and the options below.

    layout: which positions each rank holds: a name or a `Layout` (see `mb.layout`).
    mask: from `mb.masks`; default `Causal()`.
    algorithm: one of the registry `schedule.algorithms`, default "burst"; with groups that share
    heads also "hybrid" (burst inside) and "ulysses"; "auto" takes the one that is predicted to be
    fastest, with its side and head_chunks, at `rates` (what they do not state is measured, once
    per groups).
    side: "auto" (fewer bytes), "kv" or "query".
    kernel: "auto", "aten", "aten_cudnn", "narrow", "triton", "reference", or an installed
    FlashAttention package: "flash2", "flash3", "flash4".
    softmax_scale: default d ** -0.5. softcap: cap * tanh(score / cap).
    grad_wire_dtype: of travelling gradients, and of partial outputs where these travel ("tile",
    "token_ring"); None for the accumulation dtype.
    kv_cache: the fraction of travelling keys that forward keeps for backward.
    store: the fraction of results that a checkpoint around the call keeps (default: as it says).
    head_chunks: into how many chunks the key/value heads (and their query heads) are cut, whose
    rings run staggered, so that the last hops of one overlap with the compute of another, at that
    many times the messages; 1: one ring.
    sequence_chunks: into how many chunks the rows are cut, whose queries attend one behind the
    other; see `Plan.chunked` for code that makes them one at a time. row_blocks: the shard is so
    many equal runs of rows, and a chunk has equally many rows of each. visiting: "ring"; "host" is
    for `Plan.chunked` alone.

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
            q, k, v, groups=groups, needs_grad=needs_grad, sink=sink, max_logits=max_logits,
            rates=rates, **options,
        )  # fmt: skip
    else:
        _check_alone(groups=groups, needs_grad=needs_grad, rates=rates, **options)
    if isinstance(plan, InProcessPlan):
        return _in_process(plan, q, k, v, sink, max_logits, label, frame)
    if not isinstance(plan, Plan):
        raise ValueError(f"plan must be made by mb.prepare, got {plan!r:.100}")
    plan.groups.check()
    plan.check(q, k, v, sink, max_logits)
    kept = plan.keeps(frame)  # before the call counts: it may be refused
    call = plan.groups.calls.forward(plan.identity, label, sink is not None)
    out: Any = Attention.apply(plan.job, plan.groups, call, kept, max_logits, sink, q, k, v)
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
    max_logits: torch.Tensor | None,
    label: object,
    frame: Frame | None,
) -> Any:
    """All ranks at once, in one autograd function: the backward of one waits for the others."""
    shards = per_rank(plan.groups, q, k, v)
    for one, shard in zip(plan.ranks, shards, strict=True):
        one.check(*shard, sink, max_logits)
    kept = plan.ranks[0].keeps(frame)
    begin = (one.groups.calls.forward for one in plan.ranks)
    calls = [each(plan.identity, label, sink is not None) for each in begin]
    jobs, flat = [one.job for one in plan.ranks], [t for shard in shards for t in shard]
    outs = InProcessAttention.apply(jobs, plan.groups, calls, kept, max_logits, sink, *flat)
    return outs[0] if isinstance(q, torch.Tensor) else list(outs)

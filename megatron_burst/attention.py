"""The public operation: exact attention over a sequence that is split over ranks.

Runs a plan inside one autograd function, and decides what is saved for backward. What is
refused is `prepare`'s, how the ring runs is `ring`'s.

Shape letters: s local rows, b batch, h query heads, k key/value heads, d width, w value width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from . import ring
from .arguments import Shards, per_rank, signature
from .kernels import Rows
from .prepare import Plan, prepare


def attention(q: Shards, k: Shards, v: Shards, *, plan: Plan | None = None, **choices: Any) -> Any:
    """Exact attention of all positions to all positions the mask shows them.

    q [s, b, h, d]; k [s, b, k, d]; v [s, b, k, w]: this rank's shard, s rows of the positions
    that `layout` gives it; k divides h. Returns out [s, b, h, w] in the dtype of q. With
    `Groups.in_process` q, k, v are lists, one tensor per rank, and so is the result.

    Either `plan`, or the keywords from which `prepare` makes one (collective, see there):
    groups; layout: "zigzag", "striped", "contiguous" or a Layout; mask: Causal() or Full();
    algorithm: "burst", "double_ring" or "ring"; side: "auto" (fewer bytes), "kv" or "query";
    kernel: "auto", "aten", "aten_cudnn" or "reference"; softmax_scale: default d ** -0.5;
    grad_wire_dtype: of travelling gradients, None for the accumulation dtype.

    Raises ValueError for what cannot be served, RuntimeError naming the exchange if a peer died.
    """
    if plan is None:
        plan = prepare(q, k, v, **choices)
    elif choices:
        raise ValueError(f"plan: give a plan or its keywords, not both; got {sorted(choices)}")
    if not plan.matches(q, k, v):
        made, got = plan.signature, signature(*per_rank(plan.groups, q, k, v)[0])
        raise ValueError(
            f"plan: made for {made} and gradients of (q, k, v) {plan.needs_grad}; got {got}; "
            "call mb.prepare for these tensors"
        )
    flat = [tensor for shard in per_rank(plan.groups, q, k, v) for tensor in shard]
    outs = _Attention.apply(plan, *flat)
    return outs[0] if isinstance(q, torch.Tensor) else list(outs)


class _Attention(torch.autograd.Function):
    """All ranks that live in this process at once: tensors are q0, k0, v0, q1, k1, v1, ..."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        walks, shards = [], []
        for i, (run, endpoint) in enumerate(zip(plan.forwards, plan.groups.endpoints, strict=True)):
            q, k, v = (t.contiguous() for t in flat[3 * i : 3 * i + 3])
            shards.append((q, k, v))
            walks.append(ring.forward(run, endpoint, plan.kernel, q, k, v, plan.scale))
        results = ring.lockstep(walks)
        ctx.plan = plan
        ctx.save_for_backward(
            *(t for shard, result in zip(shards, results, strict=True) for t in (*shard, *result))
        )
        return tuple(out for out, _ in results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *douts: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        plan: Plan = ctx.plan
        saved = ctx.saved_tensors
        walks = []
        for i, (run, endpoint) in enumerate(
            zip(plan.backwards, plan.groups.endpoints, strict=True)
        ):
            q, k, v, out, lse = saved[5 * i : 5 * i + 5]
            delta = (douts[i].to(lse.dtype) * out.to(lse.dtype)).sum(dim=-1)
            rows = Rows(q, douts[i].contiguous(), lse, delta, out)
            walks.append(
                ring.backward(run, endpoint, plan.kernel, (k, v), rows, plan.scale,
                              plan.wire_dtype, plan.needs_grad)
            )  # fmt: skip
        grads = [grad for result in ring.lockstep(walks) for grad in result]
        dtype = saved[0].dtype
        needed = zip(grads, ctx.needs_input_grad[1:], strict=True)
        return None, *(g.to(dtype) if g is not None and need else None for g, need in needed)

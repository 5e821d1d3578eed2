"""The public operation: exact attention over a sequence that is split over ranks.

Runs a plan inside one autograd function, and decides what is saved for backward. What is
refused is `arguments`'s, how the ring runs is `ring`'s.

Shape letters: s local rows, b batch, h query heads, k key/value heads, d width, w value width.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from .comm.packing import Stamp
from .execution import passes, ulysses
from .execution.executor import Pass, lockstep, staggered
from .kernels.autograd import first_order_only, outside_graphs, refuse_transforms
from .kernels.base import Rows
from .kernels.online_softmax import row_delta, sink_gradient
from .planning.plan import Plan
from .planning.prepare import prepare
from .planning.validate import Shards, check_sink, per_rank, signature
from .recompute.checkpoint import Frame, current
from .recompute.partial_ring import rows_of, woven
from .schedule.head_shares import Share, deferred_chunks

Tensors = tuple[torch.Tensor, ...]


@outside_graphs
def attention(
    q: Shards,
    k: Shards,
    v: Shards,
    *,
    plan: Plan | None = None,
    sink: torch.Tensor | None = None,
    label: object = None,
    **choices: Any,
) -> Any:
    """Exact attention of all positions to all positions the mask shows them.

    q [s, b, h, d]; k [s, b, k, d]; v [s, b, k, w]: this rank's shard, s rows of the positions
    that `layout` gives it; k divides h. Returns out [s, b, h, w] in the dtype of q. With
    `Groups.in_process` q, k, v are lists, one tensor per rank, and so is the result.

    sink: [h], a learnable logit per head that takes part in every row's softmax and has no value
    (zeros: "off by one" softmax); its gradient is that of this rank's rows.

    label: what the ranks should agree on about this call, such as the number of a layer (a string,
    an integer or a tuple of them); where ranks are out of step, it tells calls of one plan apart.

    Either `plan`, or the keywords from which `prepare` makes one (collective, see there):
    groups; layout: a name from `layout.LAYOUTS` or a Layout; mask: from `masks`, default
    Causal(); algorithm: "burst", "double_ring", "ring", "all_gather", and with groups that
    share heads also "hybrid" (burst inside) and "ulysses"; "auto" takes the one that is predicted
    to be fastest, with its side and head_chunks, at `rates` (`Rates`; what they do not state is
    measured, once per groups); side: "auto" (fewer bytes), "kv" or
    "query"; kernel: "auto", "aten", "aten_cudnn", "triton", "reference", or "flash2", "flash3",
    "flash4", the installed FlashAttention packages; softmax_scale: default d ** -0.5; softcap:
    cap * tanh(score / cap); grad_wire_dtype: of travelling gradients, None for the accumulation
    dtype; kv_cache: the fraction of visiting keys that forward keeps for backward; head_chunks:
    into how many groups the key/value heads (and their query heads) are cut, whose rings run
    staggered, so that the last hops of one hide behind the compute of another, at that many times
    the messages; 1: one ring.

    Cannot be differentiated twice, nor run inside torch.func; torch.compile breaks its graph here,
    once. Raises ValueError for what cannot be served, RuntimeError naming the exchange if a peer
    died or is out of step.
    """
    refuse_transforms("mb.attention")
    frame = current()
    if plan is None:
        choices = {"store": frame and frame.keep} | choices
        plan = prepare(q, k, v, sink=sink, **choices)
    elif choices:
        raise ValueError(f"plan: give a plan or its keywords, not both; got {sorted(choices)}")
    if not isinstance(plan, Plan):
        raise ValueError(f"plan must be made by mb.prepare, got {plan!r:.100}")
    plan.groups.check()
    shards = per_rank(plan.groups, q, k, v)
    if not plan.matches(q, k, v):
        raise ValueError(
            f"plan: made for {plan.signature} and gradients of (q, k, v) {plan.needs_grad}; got "
            f"{signature(*shards[0])}; call mb.prepare for these tensors"
        )
    check_sink(sink, shards[0][0])
    frame = _frame_for(plan, frame)
    stamp = plan.groups.calls.forward(plan.identity, label, sink is not None)
    flat = (tensor for shard in shards for tensor in shard)
    outs = _Attention.apply(plan, stamp, sink, frame, *flat)
    return outs[0] if isinstance(q, torch.Tensor) else list(outs)


def _frame_for(plan: Plan, frame: Frame | None) -> Frame | None:
    """The frame that the call keeps its results in. ValueError if it wants what is not planned."""
    planned = plan.recompute.keep if plan.recompute is not None else None
    if frame is None or (frame.keep is None and planned is None):
        return None
    if frame.keep not in (None, planned):
        raise ValueError(
            f"plan: made with store={planned}, and the checkpoint around this call keeps "
            f"{frame.keep}; make it with mb.prepare(..., store={frame.keep})"
        )
    return frame


class _Attention(torch.autograd.Function):
    """All ranks that live in this process at once: tensors are q0, k0, v0, q1, k1, v1, ..."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        stamp: Stamp,
        sink: torch.Tensor | None,
        frame: Frame | None,
        *flat: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        shards = [tuple(t.contiguous() for t in flat[i : i + 3]) for i in range(0, len(flat), 3)]
        kept = iter(frame.get(plan.call)) if frame is not None and frame.filled else None
        walks = [
            _forward(plan, stamp, i, shard, sink,
                     None if kept is None else (next(kept), next(kept)))
            for i, shard in enumerate(shards)
        ]  # fmt: skip
        results = _run(plan, walks)
        if frame is not None and not frame.filled:
            frame.put(plan.call, _to_keep(plan, [saved for _, saved in results]))
        ctx.plan, ctx.stamp, ctx.lengths = plan, stamp, [len(saved) for _, saved in results]
        ctx.dtype = flat[0].dtype
        ctx.save_for_backward(sink, *(t for _, saved in results for t in saved))
        return tuple(out for out, _ in results)

    @staticmethod
    @first_order_only("mb.attention")
    def backward(ctx: Any, *douts: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        plan: Plan = ctx.plan
        sink, *flat = ctx.saved_tensors
        plan.groups.check()
        plan.groups.calls.backward(ctx.stamp)
        saved = iter(flat)
        walks = []
        for i, (dout, length) in enumerate(zip(douts, ctx.lengths, strict=True)):
            tensors = tuple(next(saved) for _ in range(length))
            walks.append(_backward(plan, ctx.stamp, i, dout, tensors, sink))
        results = _run(plan, walks)
        grads = [grad for result in results for grad in result[:3]]
        needed = zip(grads, ctx.needs_input_grad[4:], strict=True)
        inputs = [g.to(ctx.dtype) if g is not None and need else None for g, need in needed]
        dsink = None
        if sink is not None and ctx.needs_input_grad[2]:
            dsink = torch.stack([result[3] for result in results]).sum(0).to(sink.dtype)
        return None, None, dsink, None, *inputs


def _run(plan: Plan, walks: Sequence[Generator[None, None, Any]]) -> list[Any]:
    """The results of all local ranks. Precision is the plan's business and not autocast's."""
    _, _, device = plan.signature[0]
    try:
        with torch.autocast(torch.device(device).type, enabled=False):
            return lockstep(walks)
    except BaseException as error:
        plan.groups.fail(error)
        raise


def _to_keep(plan: Plan, saved: Sequence[Tensors]) -> Tensors:
    """out and lse of the rows that the store keeps, of all local ranks."""
    assert plan.recompute is not None
    ranks = zip(plan.recompute.ranks, saved, strict=True)
    return tuple(rows_of(t.detach(), again.kept) for again, each in ranks for t in each[3:5])


def _forward(
    plan: Plan,
    stamp: Stamp,
    index: int,
    shard: Tensors,
    sink: torch.Tensor | None,
    stored: tuple[torch.Tensor, torch.Tensor] | None,
) -> Generator[None, None, tuple[torch.Tensor, Tensors]]:
    """One local rank: (out, what backward needs: q, k, v, out, lse, kept keys as the ring saw).

    stored: out and lse of the rows that were kept when this call ran first, if it runs again.
    """
    member, run = plan.groups.members[index], replace(plan.forwards[index], stamp=stamp)
    links, heads = member.ulysses_links, shard[0].shape[2]
    q, k, v = shard
    label = f"{run.name}, heads of rank {member.rank}"
    if len(links) > 1:
        seal = run.seal("heads to rows")
        q, k, v = yield from ulysses.scatter(member.ulysses, links, shard, seal, label)
    share = Share(heads, len(links)).of(member.ulysses.rank)
    mine = None if sink is None else sink[share]
    if stored is None:
        out, lse, kept = yield from _compute(plan, index, run, (q, k, v), mine)
    else:
        assert plan.recompute is not None
        again, kept = plan.recompute.ranks[index], ()
        rows = (rows_of(q, again.rest), rows_of(k, again.keys), rows_of(v, again.keys))
        again_run = replace(again.run, stamp=stamp)
        new_out, new_lse, _ = yield from _compute(plan, index, again_run, rows, mine)
        out, lse = (woven(again, *pair) for pair in zip(stored, (new_out, new_lse), strict=True))
    saved = (q, k, v, out, lse, *(t for some in kept for keys in some for t in keys))
    if len(links) > 1:
        seal = run.seal("rows to heads")
        (out,) = yield from ulysses.gather(member.ulysses, links, [out], [heads], seal, label)
        assert out is not None
    return out, saved


def _compute(
    plan: Plan, index: int, run: Pass, tensors: Tensors, sink: torch.Tensor | None
) -> Generator[None, None, tuple[torch.Tensor, torch.Tensor, Sequence[Sequence[passes.Keys]]]]:
    """One ring per group of heads, staggered: out, lse, and the keys each leaves for backward."""
    q, k, v = tensors
    member = plan.groups.members[index]
    walks = [
        passes.forward(part, member.ring, plan.kernel, q[:, :, h], (k[:, :, n], v[:, :, n]),
                     plan.scoring, None if sink is None else sink[h])
        for part, h, n in _head_chunks(plan, run, q, k)
    ]  # fmt: skip
    outs, lses, kept = zip(*(yield from staggered(walks)), strict=True)
    return _joined(outs), _joined(lses), kept


def _backward(
    plan: Plan,
    stamp: Stamp,
    index: int,
    dout: torch.Tensor,
    saved: Tensors,
    sink: torch.Tensor | None,
) -> Generator[None, None, tuple[torch.Tensor | None, ...]]:
    """One local rank: dq, dk, dv in the accumulation dtype, and the gradient of the sink."""
    member, run = plan.groups.members[index], replace(plan.backwards[index], stamp=stamp)
    links, heads = member.ulysses_links, dout.shape[2]
    q, k, v, out, lse, *kept = saved
    label = f"{run.name}, heads of rank {member.rank}"
    if len(links) > 1:
        seal = run.seal("heads to rows")
        (dout,) = yield from ulysses.scatter(member.ulysses, links, [dout], seal, label)
    delta = row_delta(dout, out, lse.dtype)
    rows = q, dout.contiguous(), lse, delta, out
    keys = list(zip(kept[::2], kept[1::2], strict=True))
    each = len(run.kept)
    walks = [
        passes.backward(part, member.ring, plan.kernel, Rows(*(x[:, :, h] for x in rows)),
                      (k[:, :, n], v[:, :, n]), keys[i * each : (i + 1) * each], plan.scoring,
                      plan.wire_dtype, plan.needs_grad)
        for i, (part, h, n) in enumerate(_head_chunks(plan, run, q, k))
    ]  # fmt: skip
    parts = yield from staggered(walks)
    grads = [None if None in g else _joined(g) for g in zip(*parts, strict=True)]
    if len(links) > 1:
        kv_heads = plan.signature[1][0][2]
        counts = (heads, kv_heads, kv_heads)
        wire = [None if g is None else g.to(plan.wire_dtype) for g in grads]
        seal = run.seal("rows to heads")
        grads = yield from ulysses.gather(member.ulysses, links, wire, counts, seal, label)
    dsink = None
    if sink is not None:
        share = Share(heads, len(links)).of(member.ulysses.rank)
        dsink = torch.zeros(heads, dtype=lse.dtype, device=lse.device)
        dsink[share] = sink_gradient(sink[share], lse, delta)
    return *grads, dsink


def _head_chunks(
    plan: Plan, run: Pass, q: torch.Tensor, k: torch.Tensor
) -> Iterator[tuple[Pass, slice, slice]]:
    """The pass of each group of heads, and which heads of q and of k are in it.

    The last ones keep what waits for nobody for the end, when their gradients travel home: others
    have started before them, so that nobody misses it at the beginning.
    """
    count = plan.head_chunks
    late = deferred_chunks(count)
    heads, kv_heads = q.shape[2] // count, k.shape[2] // count
    for i in range(count):
        mine, keys = (slice(i * n, (i + 1) * n) for n in (heads, kv_heads))
        name = run.name if count == 1 else f"{run.name}, heads {mine.start} to {mine.stop - 1}"
        program = run.program if i < count - late else run.own_last
        yield replace(run, name=name, program=program), mine, keys


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The heads of all groups side by side."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=2)

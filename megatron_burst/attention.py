"""The public operation: exact attention over a sequence that is split over ranks.

`prepare` checks the arguments, makes the ranks agree, resolves every "auto" and returns a
`Plan`; `attention` runs it inside one autograd function. This module decides what is refused
and what is saved for backward. How the ring runs is `ring`'s, what moves when is `schedule`'s.

Shape letters: s local rows, b batch, h query heads, k key/value heads, d width, w value width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from . import cost, kernels, ring, schedule
from .agreement import Facts, agree
from .comm import Groups
from .config import BurstConfig
from .kernels import Kernel, Rows
from .layout import Layout, make
from .masks import Causal, Cover, Mask, cover
from .merge import accumulation_dtype
from .ring import Pass
from .schedule import Grid, Pair

Shards = torch.Tensor | Sequence[torch.Tensor]
NeedsGrad = tuple[bool, bool, bool]
WIRE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Plan:
    """Everything a call of `attention` needs besides its tensors. Make it with `prepare`."""

    groups: Groups
    config: BurstConfig  # with nothing left on "auto"
    layout: Layout
    mask: Mask
    kernel: Kernel
    scale: float
    wire_dtype: torch.dtype
    needs_grad: NeedsGrad
    signature: tuple
    sizes: cost.Sizes
    forwards: tuple[Pass, ...]  # one per local rank, like `backwards`
    backwards: tuple[Pass, ...]

    def matches(self, q: Shards, k: Shards, v: Shards) -> bool:
        """Do these tensors have the shapes, dtypes and device that the plan was made for, and
        need no gradient that it did not foresee?"""
        shards = _per_rank(self.groups, q, k, v)
        return all(
            _signature(*tensors) == self.signature
            and all(p or not t.requires_grad for t, p in zip(tensors, self.needs_grad, strict=True))
            for tensors in shards
        )

    def traffic(self, side: str | None = None) -> tuple[cost.Traffic, cost.Traffic]:
        """Bytes this rank sends per call, forward and backward; with `side` as if it ran that."""
        grid, rank = _grid(self.groups), self.groups.rank
        algorithm, side = self.config.algorithm, side or self.config.side
        return (
            cost.forward_traffic(algorithm, grid, rank, self.sizes),
            cost.backward_traffic(algorithm, grid, rank, self.sizes, side),
        )

    def describe(self) -> str:
        """What runs, on one line: choices, bytes per layer and rank, and the other side's cost."""
        config, groups = self.config, self.groups
        there, back = self.traffic()
        other = "kv" if config.side == "query" else "query"
        return " | ".join(
            [
                f"burst attention: {config.algorithm}",
                f"{groups.inter_size} x {groups.intra_size} ranks (nodes x ranks per node)",
                f"side {config.side}",
                f"layout {config.layout}",
                f"kernel {config.kernel}",
                f"bytes per layer and rank: forward {_bytes(there)}, backward {_bytes(back)} "
                f"(side {other} would send {_bytes(self.traffic(other)[1])})",
                "store none",
            ]
        )


def prepare(
    q: Shards,
    k: Shards,
    v: Shards,
    *,
    groups: Groups,
    layout: str | Layout = "zigzag",
    mask: Mask | None = None,
    algorithm: str = "burst",
    side: str = "auto",
    kernel: str = "auto",
    softmax_scale: float | None = None,
    grad_wire_dtype: torch.dtype | None = None,
    needs_grad: NeedsGrad | None = None,
) -> Plan:
    """Check the arguments of `attention`, on all ranks alike, and resolve every "auto".

    Collective: every rank of `groups` must call it (one all-gather of 1.2 KB per rank on the
    host). Make one plan per micro-batch and use it in every layer of the same shapes.

    Of q, k, v only shapes, dtypes, device and `requires_grad` are read; `needs_grad` states the
    latter where the tensors do not (a plan may foresee gradients that a call does not need).
    The other arguments are those of `attention`. Raises the same ValueError on every rank.
    """
    config = BurstConfig(algorithm=algorithm, side=side, kernel=kernel)
    if algorithm == "megatron":
        raise ValueError(f"algorithm must be one of {', '.join(schedule.ALGORITHMS)}, got megatron")
    mask = Causal() if mask is None else mask
    drafts: list[_Draft | ValueError] = []
    for tensors in _per_rank(groups, q, k, v):
        try:
            drafts.append(_draft(tensors, groups, layout, mask, config, grad_wire_dtype,
                                 softmax_scale, needs_grad))  # fmt: skip
        except ValueError as error:
            drafts.append(error)
    agree([d if isinstance(d, ValueError) else d.facts for d in drafts], groups.gather)
    draft = drafts[0]
    assert isinstance(draft, _Draft)
    return _plan(draft, groups, mask, config)


def attention(
    q: Shards, k: Shards, v: Shards, *, plan: Plan | None = None, **choices: Any
) -> Any:
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
        made, got = plan.signature, _signature(*_per_rank(plan.groups, q, k, v)[0])
        raise ValueError(
            f"plan: made for {made} and gradients of (q, k, v) {plan.needs_grad}; got {got}; "
            "call mb.prepare for these tensors"
        )
    flat = [tensor for shard in _per_rank(plan.groups, q, k, v) for tensor in shard]
    outs = _Attention.apply(plan, *flat)
    return outs[0] if isinstance(q, torch.Tensor) else list(outs)


class _Attention(torch.autograd.Function):
    """All ranks that live in this process at once: tensors are q0, k0, v0, q1, k1, v1, ..."""

    @staticmethod
    def forward(ctx, plan: Plan, *flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        shards = [tuple(t.contiguous() for t in flat[i : i + 3]) for i in range(0, len(flat), 3)]
        results = ring.lockstep(
            [
                ring.forward(run, endpoint, plan.kernel, *shard, plan.scale)
                for run, endpoint, shard in zip(
                    plan.forwards, plan.groups.endpoints, shards, strict=True
                )
            ]
        )
        ctx.plan = plan
        saved = [(*shard, *result) for shard, result in zip(shards, results, strict=True)]
        ctx.save_for_backward(*(tensor for tensors in saved for tensor in tensors))
        return tuple(out for out, _ in results)

    @staticmethod
    @once_differentiable
    def backward(ctx, *douts: torch.Tensor):
        plan: Plan = ctx.plan
        saved = ctx.saved_tensors
        walks = []
        for i, dout in enumerate(douts):
            q, k, v, out, lse = saved[5 * i : 5 * i + 5]
            delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(dim=-1)
            rows = Rows(q, dout.contiguous(), lse, delta, out)
            walks.append(
                ring.backward(
                    plan.backwards[i], plan.groups.endpoints[i], plan.kernel, (k, v), rows,
                    plan.scale, plan.wire_dtype, plan.needs_grad,
                )
            )  # fmt: skip
        grads = [grad for result in ring.lockstep(walks) for grad in result]
        wanted = zip(grads, ctx.needs_input_grad[1:], saved_inputs(saved), strict=True)
        return None, *(g.to(t.dtype) if g is not None and need else None for g, need, t in wanted)


def saved_inputs(saved: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [t for i in range(0, len(saved), 5) for t in saved[i : i + 3]]


# --- making a plan -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Draft:
    """One rank's checked arguments, before the ranks have compared them."""

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    layout: Layout
    kernel: Kernel
    scale: float
    wire_dtype: torch.dtype
    needs_grad: NeedsGrad
    facts: Facts


def _draft(tensors, groups, layout, mask, config, wire_dtype, scale, needs_grad) -> _Draft:
    q, k, v = tensors
    _check_shapes(q, k, v)
    _check_devices(groups, q)
    if not isinstance(mask, Mask):
        raise ValueError(f"mask must be one of mb.masks, got {mask!r}")
    layout = make(layout, cp_size=groups.size) if isinstance(layout, str) else layout
    if layout.cp_size != groups.size:
        raise ValueError(f"layout is for {layout.cp_size} ranks, groups have {groups.size}")
    layout.check(q.shape[0] * groups.size)
    kernel = kernels.make(config.kernel, q, k, v)
    wire_dtype = wire_dtype or accumulation_dtype(q.dtype)
    if wire_dtype not in WIRE_DTYPES:
        raise ValueError(f"grad_wire_dtype must be a floating dtype or None, got {wire_dtype}")
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    needs = needs_grad or (q.requires_grad, k.requires_grad, v.requires_grad)
    facts: Facts = {
        "grid (nodes, ranks per node)": (groups.inter_size, groups.intra_size),
        "q": (tuple(q.shape), q.dtype),
        "k": (tuple(k.shape), k.dtype),
        "v": (tuple(v.shape), v.dtype),
        "device": q.device.type,
        "needs gradient (q, k, v)": needs,
        "algorithm": config.algorithm,
        "side": config.side,
        "kernel": kernel.name,
        "layout": layout,
        "mask": mask,
        "softmax_scale": scale,
        "grad_wire_dtype": wire_dtype,
    }
    return _Draft(tensors, layout, kernel, scale, wire_dtype, needs, facts)


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4 or 0 in tensor.shape:
            raise ValueError(f"{name} must be [s, b, heads, width], got {tuple(tensor.shape)}")
        if not tensor.is_floating_point() or tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(
                f"{name}: q, k, v must share a floating dtype and a device, got {tensor.dtype} on "
                f"{tensor.device} beside {q.dtype} on {q.device}"
            )
    if k.shape[:2] != q.shape[:2] or v.shape[:2] != q.shape[:2] or v.shape[2] != k.shape[2]:
        raise ValueError(
            "q, k, v must share s and b, and k, v their heads, got "
            f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"k: width must be that of q, {q.shape[3]}, got {k.shape[3]}")
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"k: the number of key/value heads must divide the {q.shape[2]} query heads, "
            f"got {k.shape[2]}"
        )


def _check_devices(groups: Groups, q: torch.Tensor) -> None:
    wanted = {"gloo": "cpu", "nccl": "cuda"}.get(groups.backend)
    if groups.size > 1 and wanted and q.device.type != wanted:
        raise ValueError(
            f"groups: backend {groups.backend} moves {wanted} tensors, got {q.device.type}; "
            f"make the process group with backend {'nccl' if wanted == 'cpu' else 'gloo'}"
        )


def _plan(draft: _Draft, groups: Groups, mask: Mask, config: BurstConfig) -> Plan:
    grid = _grid(groups)
    sizes = _sizes(draft)
    side = config.side
    if side == "auto":
        side = cost.cheaper_side(config.algorithm, grid, sizes)
    there = schedule.forward(config.algorithm, grid)
    back = schedule.backward(
        config.algorithm, grid, side, gradients=sizes.gradients_travel(side)
    )
    spans = [
        draft.layout.spans(rank, draft.tensors[0].shape[0] * grid.size) for rank in range(grid.size)
    ]

    def passes(name: str, plan: schedule.Schedule) -> tuple[Pass, ...]:
        return tuple(
            _pass(name, plan.program(rank), mask, spans, draft.kernel)
            for rank in groups.local_ranks
        )

    return Plan(
        groups=groups,
        config=BurstConfig(config.algorithm, draft.layout.name, side, draft.kernel.name),
        layout=draft.layout,
        mask=mask,
        kernel=draft.kernel,
        scale=draft.scale,
        wire_dtype=draft.wire_dtype,
        needs_grad=draft.needs_grad,
        signature=_signature(*draft.tensors),
        sizes=sizes,
        forwards=passes("attention forward", there),
        backwards=passes(f"attention backward, side {side}", back),
    )


def _pass(name, program, mask, spans, kernel) -> Pass:
    """The works of one rank's pairs; what is wholly masked is left out, and never computed."""
    works: dict[Pair, Any] = {}
    for pair in (boundary.pair for boundary in program if boundary.pair is not None):
        q_spans, k_spans = spans[pair.query], spans[pair.key]
        if cover(mask, q_spans, k_spans) != Cover.EMPTY:
            works[pair] = kernel.plan(mask, q_spans, k_spans)
    return Pass(name, program, works)


def _sizes(draft: _Draft) -> cost.Sizes:
    q, k, v = draft.tensors
    return cost.Sizes(
        tokens=q.shape[0],
        batch=q.shape[1],
        heads=q.shape[2],
        kv_heads=k.shape[2],
        width=q.shape[3],
        value_width=v.shape[3],
        itemsize=q.element_size(),
        stat_itemsize=accumulation_dtype(q.dtype).itemsize,
        wire_itemsize=draft.wire_dtype.itemsize,
        needs_grad=draft.needs_grad,
    )


def _grid(groups: Groups) -> Grid:
    return Grid(groups.inter_size, groups.intra_size)


def _per_rank(groups: Groups, q: Shards, k: Shards, v: Shards) -> list[tuple]:
    """(q, k, v) of each local rank."""
    lists = [[x] if isinstance(x, torch.Tensor) else list(x) for x in (q, k, v)]
    for name, shards in zip("qkv", lists, strict=True):
        if len(shards) != len(groups.local_ranks):
            raise ValueError(
                f"{name}: groups hold {len(groups.local_ranks)} ranks in this process, "
                f"got {len(shards)} tensors"
            )
    return list(zip(*lists, strict=True))


def _signature(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple:
    return tuple(q.shape), tuple(k.shape), tuple(v.shape), str(q.dtype), str(k.dtype), \
        str(v.dtype), str(q.device)  # fmt: skip


def _bytes(traffic: cost.Traffic) -> str:
    def human(count: float) -> str:
        for unit in ("B", "KiB", "MiB"):
            if count < 1024:
                return f"{count:.4g} {unit}"
            count /= 1024
        return f"{count:.4g} GiB"

    return f"{human(traffic.intra)} intra + {human(traffic.inter)} inter"

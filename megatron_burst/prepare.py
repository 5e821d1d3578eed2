"""From a user's arguments to a plan that every rank agrees on.

Makes the ranks agree and resolves every "auto". What is refused is `arguments`'s; how the ring
runs is `ring`'s, what moves when is `schedule`'s, what it costs is `cost`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from . import cost, recompute
from .agreement import agree
from .arguments import Choices, Draft, NeedsGrad, Shards, Signature, check, per_rank, signature
from .groups import Groups
from .head_parallel import Share
from .hops import Grid, Pair
from .kernels import Kernel, Scoring
from .layout import Layout, Span
from .masks import Causal, Mask, shards_visible
from .merge import accumulation_dtype
from .recompute import Recompute
from .schedule import Schedule
from .walk import Pass

# The ring that head-parallel algorithms run inside their head groups.
RINGS = {"ulysses": "ring", "hybrid": "burst"}


@dataclass(frozen=True)
class Plan:
    """Everything a call of `attention` needs besides its tensors. Make it with `prepare`."""

    groups: Groups
    algorithm: str
    layout: Layout
    mask: Mask
    kernel: Kernel
    scoring: Scoring
    wire_dtype: torch.dtype
    needs_grad: NeedsGrad
    signature: Signature
    sizes: cost.Sizes
    schedules: tuple[Schedule, Schedule]  # forward and backward
    head_groups: int
    forwards: tuple[Pass, ...]  # one per local rank, like `backwards`
    backwards: tuple[Pass, ...]
    recompute: Recompute | None  # if calls may run again, and keep something between

    def matches(self, q: Shards, k: Shards, v: Shards) -> bool:
        """Do these tensors have the shapes, dtypes and device that the plan was made for, and
        need no gradient that it did not foresee?"""
        needed = [torch.is_grad_enabled() and not planned for planned in self.needs_grad]
        return all(
            signature(*tensors) == self.signature
            and not any(t.requires_grad and new for t, new in zip(tensors, needed, strict=True))
            for tensors in per_rank(self.groups, q, k, v)
        )

    def traffic(self, side: str | None = None) -> tuple[cost.Traffic, cost.Traffic]:
        """Bytes this rank sends per call, forward and backward; with `side` as if it ran that."""
        there, back = self.schedules
        if side not in (None, back.side):
            back = cost.backward_schedule(
                back.algorithm, back.grid, back.visible, self.sizes, side=side, kept=back.kept
            )
        member = self.groups.members[0]
        heads = cost.head_traffic(member.head_links, member.head.rank, self.sizes)
        there_bytes, back_bytes = (
            cost.traffic(s, member.ring.rank, self.sizes) + h
            for s, h in zip((there, back), heads, strict=True)
        )
        return there_bytes, back_bytes

    @property
    def side(self) -> str:
        """Which tensors travel in backward."""
        return self.schedules[1].side

    @property
    def kept_bytes(self) -> int:
        """Memory that keys kept from forward take on this rank until backward."""
        return sum(self.sizes.chunk_bytes(chunk) for chunk in self.forwards[0].kept)

    def describe(self) -> str:
        """What runs, on one line: choices, bytes per layer and rank, and the other side's cost."""
        topology = self.groups.topology
        there, back = self.traffic()
        other = "kv" if self.side == "query" else "query"
        heads = f", {topology.head} sharing heads ({topology.placement})"
        return " | ".join(
            [
                f"burst attention: algorithm {self.algorithm}",
                f"{topology.size // topology.per_node} nodes x {topology.per_node} ranks"
                + heads * (topology.head > 1),
                *(f"{name} sent {s.route}ly" for name, s in zip(("forward", "backward"),
                  self.schedules, strict=True) if s.route == "direct"),
                f"side {self.side}",
                *[f"{self.head_groups} groups of heads"] * (self.head_groups > 1),
                f"layout {self.layout.name}",
                f"kernel {self.kernel.name}",
                f"bytes per layer and rank: forward {_bytes(there)}, backward {_bytes(back)} "
                f"(side {other} would send {_bytes(self.traffic(other)[1])})",
                f"store {self._describe_store()}, keys kept {_human(self.kept_bytes)}",
            ]
        )  # fmt: skip

    def _describe_store(self) -> str:
        again = self.recompute
        if again is None:
            return "none"
        traffic = again.traffic(self.groups.members[0].ring.rank, self.sizes)
        imbalance = again.imbalance()
        unequal = f", its busiest rank {imbalance:.2f} x the mean" * (imbalance > 1.05)
        return (
            f"{again.keep:g} ({_human(self.store_bytes)} per layer; recompute sends "
            f"{_bytes(traffic)}{unequal})"
        )

    @property
    def store_bytes(self) -> int:
        """Memory that results kept for a recompute take on this rank until backward."""
        if self.recompute is None:
            return 0
        sizes = self.sizes
        each = sizes.value_width * sizes.itemsize + sizes.stat_itemsize
        return len(self.recompute.ranks[0].kept) * sizes.batch * sizes.heads * each


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
    softcap: float | None = None,
    grad_wire_dtype: torch.dtype | None = None,
    kv_cache: float = 0.0,
    store: float | None = None,
    head_groups: int = 1,
    needs_grad: NeedsGrad | None = None,
    sink: torch.Tensor | None = None,
) -> Plan:
    """Check the arguments of `attention`, on all ranks alike, and resolve every "auto".

    Collective: every rank of `groups` must call it (one all-gather of 1.2 KB per rank on the
    host). Make one plan per micro-batch and use it in every layer of the same shapes.

    Of q, k, v only shapes, dtypes, device and `requires_grad` are read; `needs_grad` states the
    latter where the tensors do not (a plan may foresee gradients that a call does not need).
    `sink` is checked with the rest, and not kept: it is given to each call. The other arguments are
    those of `attention`. Raises the same ValueError on every rank.
    """
    if not isinstance(groups, Groups):
        raise ValueError(f"groups: make them with mb.Groups, got {groups!r:.100}")
    choices = Choices(
        layout, Causal() if mask is None else mask, algorithm, side, kernel, softmax_scale,
        softcap, grad_wire_dtype, kv_cache, store, head_groups, needs_grad, sink,
    )  # fmt: skip
    shards = _attempt(lambda: groups.check() or per_rank(groups, q, k, v))
    if isinstance(shards, ValueError):
        drafts: list[Draft | ValueError] = [shards] * len(groups.local_ranks)
    else:
        drafts = [_attempt(partial(check, tensors, groups, choices)) for tensors in shards]
    first = drafts[0]
    plan = first if isinstance(first, ValueError) else _attempt(partial(_plan, first, groups))
    if isinstance(plan, ValueError):
        drafts[0] = plan
    try:
        agree([d if isinstance(d, ValueError) else d.facts for d in drafts], groups.gather)
    except ValueError as error:
        raise error from next((d.__cause__ for d in drafts if isinstance(d, ValueError)), None)
    assert isinstance(plan, Plan)
    return plan


T = TypeVar("T")


def _attempt(make: Callable[[], T]) -> T | ValueError:
    """What `make` returns, or what it raises: the other ranks must not be left waiting."""
    try:
        return make()
    except ValueError as error:
        return error
    except Exception as error:
        told = ValueError(f"{type(error).__name__} in the arguments: {error}")
        told.__cause__ = error
        return told


def _plan(draft: Draft, groups: Groups) -> Plan:
    topology, sizes = groups.topology, _sizes(draft, groups)
    grid = Grid(topology.inter_size, topology.intra_size)
    spans = cost.ring_spans(draft.layout, topology, draft.tensors[0].shape[0] * groups.size)
    visible = shards_visible(draft.mask, spans, spans)
    algorithm = RINGS.get(draft.config.algorithm, draft.config.algorithm)
    kept = round(draft.kv_cache * (grid.size - 1))
    there = cost.forward_schedule(algorithm, grid, visible, sizes)
    back = cost.backward_schedule(
        algorithm, grid, visible, sizes, side=draft.config.side, kept=kept
    )
    again = None
    if draft.store is not None:
        again = recompute.plan(
            draft.mask, draft.kernel, algorithm, grid, spans, [m.ring.rank for m in groups.members],
            draft.store, groups.size, sizes,
        )  # fmt: skip
    passes = [_passes(there, back, m.ring.rank, draft, spans) for m in groups.members]
    return Plan(
        groups=groups,
        algorithm=draft.config.algorithm,
        layout=draft.layout,
        mask=draft.mask,
        kernel=draft.kernel,
        scoring=draft.scoring,
        wire_dtype=draft.wire_dtype,
        needs_grad=draft.needs_grad,
        signature=signature(*draft.tensors),
        sizes=sizes,
        schedules=(there, back),
        head_groups=draft.head_groups,
        forwards=tuple(forward for forward, _ in passes),
        backwards=tuple(backward for _, backward in passes),
        recompute=again,
    )


def _passes(
    there: Schedule, back: Schedule, rank: int, draft: Draft, spans: Sequence[Sequence[Span]]
) -> tuple[Pass, Pass]:
    """Forward and backward of one rank of the ring; a pair that is wholly masked gets no work."""
    works: dict[Pair, Any] = {}
    programs = there.program(rank), back.program(rank)
    for boundary in (*programs[0], *programs[1]):
        pair = boundary.pair
        if pair is not None and pair not in works and there.visible[pair]:
            work = draft.kernel.plan(draft.mask, spans[pair.query], spans[pair.key])
            if work is not None:
                works[pair] = work
    kept = back.kept_chunks(rank)
    names = "attention forward", f"attention backward, side {back.side}"
    forward, backward = (
        Pass(name, program, works, kept, own_last=plan.program(rank, own_last=True))
        for name, program, plan in zip(names, programs, (there, back), strict=True)
    )
    return forward, backward


def _sizes(draft: Draft, groups: Groups) -> cost.Sizes:
    q, k, v = draft.tensors
    head = groups.topology.head
    return cost.Sizes(
        tokens=q.shape[0] * head,
        batch=q.shape[1],
        heads=Share(q.shape[2], head).each,
        kv_heads=Share(k.shape[2], head).each,
        width=q.shape[3],
        value_width=v.shape[3],
        itemsize=q.element_size(),
        stat_itemsize=accumulation_dtype(q.dtype).itemsize,
        wire_itemsize=draft.wire_dtype.itemsize,
        needs_grad=draft.needs_grad,
    )


def _bytes(traffic: cost.Traffic) -> str:
    return f"{_human(traffic.intra)} intra + {_human(traffic.inter)} inter"


def _human(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"

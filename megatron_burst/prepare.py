"""From a user's arguments to a plan that every rank agrees on.

Makes the ranks agree and resolves every "auto". What is refused is `arguments`'s; how the ring
runs is `ring`'s, what moves when is `schedule`'s, what it costs is `cost`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from . import cost, schedule
from .agreement import agree
from .arguments import Choices, Draft, NeedsGrad, Shards, Signature, check, per_rank, signature
from .config import BurstConfig
from .groups import Groups
from .head_parallel import Share
from .hops import Grid, Pair
from .kernels import Kernel, Scoring
from .layout import Layout, Span
from .masks import Causal, Cover, Mask
from .merge import accumulation_dtype
from .schedule import Schedule
from .walk import Pass

# The ring that head-parallel algorithms run inside their head groups.
RINGS = {"ulysses": "ring", "hybrid": "burst"}


@dataclass(frozen=True)
class Plan:
    """Everything a call of `attention` needs besides its tensors. Make it with `prepare`."""

    groups: Groups
    config: BurstConfig  # with nothing left on "auto"
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
            back = _backward(back, side, self.sizes)
        member = self.groups.members[0]
        heads = cost.head_traffic(member.head_links, member.head.rank, self.sizes)
        there_bytes, back_bytes = (
            cost.traffic(s, member.ring.rank, self.sizes) + h
            for s, h in zip((there, back), heads, strict=True)
        )
        return there_bytes, back_bytes

    @property
    def kept_bytes(self) -> int:
        """Memory that keys kept from forward take on this rank until backward."""
        return sum(self.sizes.chunk_bytes(chunk) for chunk in self.forwards[0].kept)

    def describe(self) -> str:
        """What runs, on one line: choices, bytes per layer and rank, and the other side's cost."""
        config, topology = self.config, self.groups.topology
        there, back = self.traffic()
        other = "kv" if config.side == "query" else "query"
        heads = f", {topology.head} sharing heads ({topology.placement})"
        return " | ".join(
            [
                f"burst attention: algorithm {config.algorithm}",
                f"{topology.size // topology.per_node} nodes x {topology.per_node} ranks"
                + heads * (topology.head > 1),
                *(f"{name} sent {s.route}ly" for name, s in zip(("forward", "backward"),
                  self.schedules, strict=True) if s.route == "direct"),
                f"side {config.side}",
                *[f"{self.head_groups} groups of heads"] * (self.head_groups > 1),
                f"layout {config.layout}",
                f"kernel {config.kernel}",
                f"bytes per layer and rank: forward {_bytes(there)}, backward {_bytes(back)} "
                f"(side {other} would send {_bytes(self.traffic(other)[1])})",
                f"store none, keys kept {_human(self.kept_bytes)}",
            ]
        )  # fmt: skip


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
    head_groups: int = 1,
    needs_grad: NeedsGrad | None = None,
) -> Plan:
    """Check the arguments of `attention`, on all ranks alike, and resolve every "auto".

    Collective: every rank of `groups` must call it (one all-gather of 1.2 KB per rank on the
    host). Make one plan per micro-batch and use it in every layer of the same shapes.

    Of q, k, v only shapes, dtypes, device and `requires_grad` are read; `needs_grad` states the
    latter where the tensors do not (a plan may foresee gradients that a call does not need).
    The other arguments are those of `attention`. Raises the same ValueError on every rank.
    """
    choices = Choices(
        layout, Causal() if mask is None else mask, algorithm, side, kernel, softmax_scale,
        softcap, grad_wire_dtype, kv_cache, head_groups, needs_grad,
    )  # fmt: skip
    drafts: list[Draft | ValueError] = []
    for tensors in per_rank(groups, q, k, v):
        try:
            drafts.append(check(tensors, groups, choices))
        except ValueError as error:
            drafts.append(error)
        except Exception as error:  # whatever it was, the other ranks must not be left waiting
            drafts.append(ValueError(f"{type(error).__name__} in the arguments: {error}"))
    agree([d if isinstance(d, ValueError) else d.facts for d in drafts], groups.gather)
    draft = drafts[0]
    assert isinstance(draft, Draft)
    return _plan(draft, groups)


def _plan(draft: Draft, groups: Groups) -> Plan:
    topology, sizes = groups.topology, _sizes(draft, groups)
    grid = Grid(topology.inter_size, topology.intra_size)
    spans = _ring_spans(draft, groups)
    visible = _visible(draft.mask, spans)
    algorithm = RINGS.get(draft.config.algorithm, draft.config.algorithm)
    kept = round(draft.kv_cache * (grid.size - 1))
    there = _routed(lambda r: schedule.forward(algorithm, grid, visible=visible, route=r), sizes)
    draft_back = Schedule(algorithm, grid, "kv", True, visible, kept=kept)
    side = draft.config.side
    if side == "auto":
        side = cost.cheaper_side(lambda s: _backward(draft_back, s, sizes), sizes)
        side = "kv" if kept else side
    back = _backward(draft_back, side, sizes)
    passes = [_passes(there, back, m.ring.rank, draft, spans) for m in groups.members]
    return Plan(
        groups=groups,
        config=BurstConfig(draft.config.algorithm, draft.layout.name, side, draft.kernel.name),
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
    )


def _ring_spans(draft: Draft, groups: Groups) -> list[list[Span]]:
    """The positions each ring member computes with: those of its whole head group."""
    topology, layout = groups.topology, draft.layout
    seq_len = draft.tensors[0].shape[0] * groups.size
    ring = topology.ring(groups.rank)
    return [
        [s for member in topology.head_group(rank) for s in layout.spans(member, seq_len)]
        for rank in ring
    ]


def _visible(mask: Mask, spans: list[list[Span]]) -> np.ndarray:
    """bool [G, G]: may anything of these queries see anything of those keys?"""
    owner = np.repeat(np.arange(len(spans)), [len(each) for each in spans])
    fields = np.array([span for each in spans for span in each], dtype=np.int64).T
    covers = mask.covers(Span(*fields[:, :, None]), Span(*fields[:, None, :]))
    visible = np.zeros((len(spans), len(spans)), dtype=bool)
    i, j = np.nonzero(covers != Cover.EMPTY)
    visible[owner[i], owner[j]] = True
    return visible


def _routed(make_schedule: Callable[[str], Schedule], sizes: cost.Sizes) -> Schedule:
    """The schedule by the cheaper route; where everything is wanted the ring is."""
    ring = make_schedule("ring")
    if ring.visible.all() or ring.algorithm == "all_gather":
        return ring
    return make_schedule(cost.cheaper_route(make_schedule, sizes))


def _backward(like: Schedule, side: str, sizes: cost.Sizes) -> Schedule:
    """The backward schedule with `side`; keys can be kept where they are what travels."""
    return _routed(
        lambda route: schedule.backward(
            like.algorithm,
            like.grid,
            side,
            gradients=sizes.gradients_travel(side),
            visible=like.visible,
            route=route,
            kept=like.kept if side == "kv" else 0,
        ),
        sizes,
    )


def _passes(
    there: Schedule, back: Schedule, rank: int, draft: Draft, spans: list[list[Span]]
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
        Pass(name, program, works, kept, plan.program(rank, own_last=True))
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

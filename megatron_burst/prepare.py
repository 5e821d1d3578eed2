"""From a user's arguments to a plan that every rank agrees on.

Makes the ranks agree and resolves every "auto". What is refused is `arguments`'s; how the ring
runs is `ring`'s, what moves when is `schedule`'s, what it costs is `cost`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from . import cost, schedule
from .agreement import agree
from .arguments import Choices, Draft, NeedsGrad, Shards, Signature, check, per_rank, signature
from .config import BurstConfig
from .groups import Groups
from .kernels import Kernel
from .layout import Layout
from .masks import Causal, Mask
from .merge import accumulation_dtype
from .ring import Pass
from .schedule import Grid, Pair


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
    signature: Signature
    sizes: cost.Sizes
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
                f"burst attention: algorithm {config.algorithm}",
                f"{groups.inter_size} nodes x {groups.intra_size} ranks",
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
    choices = Choices(
        layout, Causal() if mask is None else mask, algorithm, side, kernel, softmax_scale,
        grad_wire_dtype, needs_grad,
    )  # fmt: skip
    drafts: list[Draft | ValueError] = []
    for tensors in per_rank(groups, q, k, v):
        try:
            drafts.append(check(tensors, groups, choices))
        except ValueError as error:
            drafts.append(error)
    agree([d if isinstance(d, ValueError) else d.facts for d in drafts], groups.gather)
    draft = drafts[0]
    assert isinstance(draft, Draft)
    return _plan(draft, groups)


def _plan(draft: Draft, groups: Groups) -> Plan:
    algorithm, side = draft.config.algorithm, draft.config.side
    grid, sizes = _grid(groups), _sizes(draft)
    if side == "auto":
        side = cost.cheaper_side(algorithm, grid, sizes)
    there = schedule.forward(algorithm, grid)
    back = schedule.backward(algorithm, grid, side, gradients=sizes.gradients_travel(side))
    return Plan(
        groups=groups,
        config=BurstConfig(algorithm, draft.layout.name, side, draft.kernel.name),
        layout=draft.layout,
        mask=draft.mask,
        kernel=draft.kernel,
        scale=draft.scale,
        wire_dtype=draft.wire_dtype,
        needs_grad=draft.needs_grad,
        signature=signature(*draft.tensors),
        sizes=sizes,
        forwards=_passes("attention forward", there, draft, groups),
        backwards=_passes(f"attention backward with side {side}", back, draft, groups),
    )


def _passes(name: str, plan: schedule.Schedule, draft: Draft, groups: Groups) -> tuple[Pass, ...]:
    """The pass of each local rank; a pair that is wholly masked gets no work."""
    seq_len = draft.tensors[0].shape[0] * groups.size
    spans = [draft.layout.spans(rank, seq_len) for rank in range(groups.size)]
    passes = []
    for rank in groups.local_ranks:
        program = plan.program(rank)
        works: dict[Pair, Any] = {}
        for pair in (boundary.pair for boundary in program):
            if pair is None:
                continue
            work = draft.kernel.plan(draft.mask, spans[pair.query], spans[pair.key])
            if work is not None:
                works[pair] = work
        passes.append(Pass(name, program, works))
    return tuple(passes)


def _sizes(draft: Draft) -> cost.Sizes:
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


def _bytes(traffic: cost.Traffic) -> str:
    def human(count: float) -> str:
        for unit in ("B", "KiB", "MiB"):
            if count < 1024:
                return f"{count:.4g} {unit}"
            count /= 1024
        return f"{count:.4g} GiB"

    return f"{human(traffic.intra)} intra + {human(traffic.inter)} inter"

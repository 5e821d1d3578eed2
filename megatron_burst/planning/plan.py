"""What runs, decided and agreed on: a plan, what it costs, and the line that says so.

Plain data, made by `prepare` and run by `attention`. Decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..autotune.select import Choice
from ..comm import packing
from ..comm.groups import Groups
from ..execution.executor import Pass
from ..kernels import native
from ..kernels.base import Kernel, Scoring
from ..layout import Layout
from ..masks import Mask
from ..recompute.partial_ring import Recompute
from ..schedule import cost
from ..schedule.rings import Schedule
from ..schedule.tables import Chunk
from .validate import NeedsGrad, Shards, Signature, per_rank, signature


@dataclass(frozen=True)
class Plan:
    """Everything a call of `attention` needs besides its tensors. Make it with `prepare`.

    identity: digest of what all ranks agreed on, the same on each.
    """

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
    head_chunks: int
    forwards: tuple[Pass, ...]  # one per local rank, like `backwards`
    backwards: tuple[Pass, ...]
    identity: int
    recompute: Recompute | None  # if calls may run again, and keep something between
    choice: Choice | None = None  # why, where the algorithm was left open

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
        heads = cost.head_traffic(member.ulysses_links, member.ulysses.rank, self.sizes)
        there_bytes, back_bytes = (
            cost.traffic(s, member.ring.rank, self.sizes) + h
            for s, h in zip((there, back), heads, strict=True)
        )
        return there_bytes, back_bytes

    @property
    def call(self) -> tuple[object, ...]:
        """What tells one attention call from another: tensors, mask and layout."""
        return self.signature, self.mask, self.layout

    @property
    def side(self) -> str:
        """Which tensors travel in backward."""
        return self.schedules[1].side

    @property
    def kept_bytes(self) -> int:
        """Memory that keys kept from forward take on this rank until backward."""
        return sum(self.sizes.chunk_bytes(chunk) for chunk in self.forwards[0].kept)

    @property
    def longest_message(self) -> int:
        """Bytes, seal and alignment included, of the longest message that any rank sends."""
        families = ("kv", "query", "dkv", "dquery")
        shared = self.sizes.scattered_bytes(self.groups.topology.ulysses)
        payload = max(*(self.sizes.chunk_bytes(Chunk(family, 0)) for family in families), *shared)
        return payload + len(families) * packing.ALIGNMENT + packing.SEAL

    def describe(self) -> str:
        """What runs, on one line: choices, bytes per layer and rank, and the other side's cost."""
        topology = self.groups.topology
        there, back = self.traffic()
        other = "kv" if self.side == "query" else "query"
        heads = f", {topology.ulysses} sharing heads ({topology.placement})"
        return " | ".join(
            [
                f"burst attention: algorithm {self.algorithm}{self._why()}",
                f"{topology.size // topology.per_node} nodes x {topology.per_node} ranks"
                + heads * (topology.ulysses > 1),
                *(f"{name} sent {s.route}ly" for name, s in zip(("forward", "backward"),
                  self.schedules, strict=True) if s.route == "direct"),
                f"side {self.side}",
                *[f"{self.head_chunks} head chunks"] * (self.head_chunks > 1),
                f"layout {self.layout.name}",
                f"kernel {self.kernel.name}" + " with csrc" * native.serves(self._device_type),
                f"bytes per layer and rank: forward {_bytes(there)}, backward {_bytes(back)} "
                f"(side {other} would send {_bytes(self.traffic(other)[1])})",
                f"store {self._describe_store()}, keys kept {cost.human_bytes(self.kept_bytes)}",
            ]
        )  # fmt: skip

    @property
    def _device_type(self) -> str:
        return torch.device(self.signature[0][2]).type

    def _why(self) -> str:
        if self.choice is None:
            return ""
        return f" (auto: {self.choice.why}; {self.choice.rates.describe()})"

    def _describe_store(self) -> str:
        again = self.recompute
        if again is None:
            return "none"
        traffic = again.traffic(self.groups.members[0].ring.rank, self.sizes)
        imbalance = again.imbalance()
        unequal = f", its busiest rank {imbalance:.2f} x the mean" * (imbalance > 1.05)
        return (
            f"{again.keep:g} ({cost.human_bytes(self.store_bytes)} per layer; recompute sends "
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


def _bytes(traffic: cost.Traffic) -> str:
    return f"{cost.human_bytes(traffic.intra)} intra + {cost.human_bytes(traffic.inter)} inter"

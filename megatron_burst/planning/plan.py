"""What runs, decided and agreed on: a plan, what it costs, and the line that says so.

Plain data, made by `prepare` and run by `attention`. Decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ..autotune.select import Choice
from ..comm import packing
from ..comm.groups import Groups
from ..comm.transport import Channel
from ..execution.function import Kept
from ..execution.job import Job
from ..kernels import native
from ..kernels.base import Kernel
from ..layout import Layout
from ..masks import Mask
from ..options import AttentionOptions
from ..recompute.checkpoint import Frame
from ..recompute.partial_ring import Recompute
from ..schedule import cost
from ..schedule.rings import Schedule
from ..schedule.tables import FAMILIES, ROUTES
from ..units import byte_size
from .tensors import Signature, check_max_logits, check_shapes, check_sink, signature
from .validate import NeedsGrad


@dataclass(frozen=True)
class Plan:
    """Everything a call of `attention` on one rank needs besides its tensors, made by `prepare`.

    groups: the rank's. options: as given, with every "auto" and default resolved. layout, mask:
    the objects that these name. signature: shapes, dtypes and device of q, k, v. sizes: this rank's
    share in its ring. schedules: of forward and backward.
    identity: digest of what all ranks agreed on, the same on each; digest: of the tables of the
    schedules. job: what this rank executes.
    recompute: if calls may run again, and keep something between. choice: why, where the algorithm
    was left open.
    """

    groups: Groups
    options: AttentionOptions
    layout: Layout
    mask: Mask
    signature: Signature
    sizes: cost.Sizes
    schedules: tuple[Schedule, Schedule]
    identity: int
    digest: int
    job: Job
    recompute: Recompute | None
    choice: Choice | None = None

    def matches(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
        """Do q, k, v have the shapes, dtypes and device that the plan was made for, and need no
        gradient that it did not foresee?"""
        unforeseen = [torch.is_grad_enabled() and not planned for planned in self.job.needs_grad]
        return signature(q, k, v) == self.signature and not any(
            t.requires_grad and new for t, new in zip((q, k, v), unforeseen, strict=True)
        )

    def check(
        self, q: Any, k: Any, v: Any, sink: torch.Tensor | None, max_logits: torch.Tensor | None
    ) -> None:
        """Raise ValueError unless the plan was made for a call with these tensors.

        q, k, v, sink, max_logits: as `attention` takes them.
        """
        if not all(isinstance(t, torch.Tensor) for t in (q, k, v)):
            check_shapes(q, k, v)
        if not self.matches(q, k, v):
            raise ValueError(
                f"plan: made for {self.signature} and gradients of (q, k, v) {self.needs_grad}; "
                f"got {signature(q, k, v)}; call mb.prepare for these tensors"
            )
        if torch.are_deterministic_algorithms_enabled():  # perhaps not yet when it was planned
            kernel = self.kernel
            reason = kernel.refusal(q, k, v) if kernel.deterministic else "is not deterministic"
            if reason is not None:
                raise ValueError(
                    f"plan: kernel {kernel.name} {reason}, and torch.use_deterministic_algorithms("
                    "True) was called; call mb.prepare again"
                )
        check_sink(sink, q)
        check_max_logits(max_logits, q)
        if max_logits is not None and not self.kernel.maximum:
            raise ValueError(
                f"max_logits: kernel {self.kernel.name} of this plan cannot tell the largest "
                "scores; pass max_logits to mb.prepare too"
            )

    def keeps(self, frame: Frame | None) -> Kept | None:
        """Where a call leaves or finds results: in `frame`, that of the checkpoint around it.

        Raises ValueError if the checkpoint wants what was not planned.
        """
        planned = self.recompute.keep if self.recompute is not None else None
        if frame is None or (frame.keep is None and planned is None):
            return None
        if frame.keep not in (None, planned):
            raise ValueError(
                f"plan: made with store={planned}, and the checkpoint around this call keeps "
                f"{frame.keep}; make it with mb.prepare(..., store={frame.keep})"
            )
        return Kept(frame, self.call)

    def with_kernel(self, kernel: Kernel) -> Plan:
        """The same plan on another kernel that takes the work of this one's; for measuring."""
        return replace(self, job=replace(self.job, kernel=kernel))

    @property
    def algorithm(self) -> str:
        """The algorithm that runs."""
        return self.options.algorithm

    @property
    def kernel(self) -> Kernel:
        """The local attention."""
        return self.job.kernel

    @property
    def needs_grad(self) -> NeedsGrad:
        """Which of q, k, v the backward makes gradients of."""
        return self.job.needs_grad

    @property
    def head_chunks(self) -> int:
        """In how many chunks the heads go round the ring; 1: all at once."""
        return self.job.head_chunks

    def traffic(self, side: str | None = None) -> tuple[cost.Traffic, cost.Traffic]:
        """Bytes this rank sends per call, forward and backward; with `side` as if it ran that."""
        there, back = self.schedules
        if side not in (None, back.side):
            back = cost.backward_schedule(
                back.algorithm, back.grid, back.wanted, self.sizes, side=side, kept=back.kept
            )
        groups = self.groups
        heads = cost.head_traffic(groups.ulysses_links, groups.ulysses.rank, self.sizes)
        there_bytes, back_bytes = (
            # Of copies: the tables of all ranks are not kept.
            cost.traffic(replace(s), groups.ring.rank, self.sizes) + h
            for s, h in zip((there, back), heads, strict=True)
        )
        return there_bytes, back_bytes

    @property
    def channels(self) -> list[Channel]:
        """What its messages may travel on, in the order in which their process groups are made."""
        schedules = list(self.schedules)
        if self.recompute is not None:
            schedules.append(self.recompute.schedule)
        if not self.mask.cacheable:  # documents: the next batch may take the other route
            schedules = [replace(each, route=route) for each in schedules for route in ROUTES]
        channels = [Channel(*each) for schedule in schedules for each in schedule.channels]
        if self.groups.topology.ulysses > 1:
            channels.append(Channel("ulysses", False))
        return list(dict.fromkeys(channels))

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
        forward = self.job.forward
        return sum(map(forward.maps.count, forward.kept)) * self.sizes.forward.kv

    @property
    def held_bytes(self) -> int:
        """Most memory at a time of chunks of other ranks and partial results of them."""
        return max(run.held_bytes for run in (self.job.forward, self.job.backward))

    @property
    def longest_message(self) -> int:
        """Bytes, envelope and alignment included, of the longest message that any rank sends."""
        shared = self.sizes.scattered_bytes(self.groups.topology.ulysses)
        payload = max(*map(self.sizes.chunk_bytes, FAMILIES), *shared)
        tensors = 4  # of a message, at most
        return payload + tensors * packing.ALIGNMENT + packing.ENVELOPE

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
                f"layout {self.layout.describe()}",
                f"kernel {self.kernel.name}" + " with csrc" * native.serves(self._device_type),
                f"bytes per layer and rank: forward {_bytes(there)}, backward {_bytes(back)} "
                f"(side {other} would send {_bytes(self.traffic(other)[1])})",
                f"store {self._describe_store()}, keys kept {byte_size(self.kept_bytes)}",
                f"chunks of other ranks at most {byte_size(self.held_bytes)}",
                *filter(None, [self.groups.communicators]),
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
        traffic = again.traffic(self.groups.ring.rank, self.sizes)
        imbalance = again.imbalance()
        unequal = f", its busiest rank {imbalance:.2f} x the mean" * (imbalance > 1.05)
        return (
            f"{again.keep:g} ({byte_size(self.store_bytes)} per layer; recompute sends "
            f"{_bytes(traffic)}{unequal})"
        )

    @property
    def store_bytes(self) -> int:
        """Memory that results kept for a recompute take on this rank until backward."""
        if self.recompute is None:
            return 0
        sizes = self.sizes
        each = sizes.value_width * sizes.itemsize + sizes.stat_itemsize
        return len(self.recompute.run.kept) * sizes.batch * sizes.heads * each


def _bytes(traffic: cost.Traffic) -> str:
    return f"{byte_size(traffic.intra)} intra + {byte_size(traffic.inter)} inter"

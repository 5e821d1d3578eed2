"""What a plan consists of, what it costs, and the line that says so.

Plain data and what is counted from it. Decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch

from ..autotune.select import Choice
from ..comm import packing
from ..comm.groups import Groups
from ..comm.transport import Channel
from ..execution.job import Job
from ..kernels import native
from ..kernels.base import Kernel
from ..layout import Layout
from ..layout.row_chunks import row_chunks
from ..masks import Mask
from ..options import AttentionOptions
from ..recompute import partial_ring
from ..recompute.partial_ring import Recompute
from ..schedule import cost
from ..schedule.rings import Schedule
from ..schedule.tables import ROUTES
from ..units import byte_size
from .tensors import (
    Signature,
)
from .validate import NeedsGrad


@dataclass(frozen=True)
class Planned:
    """What all ranks agreed on, and what one of them executes: the fields of a `Plan`, which
    says what they are.
    """

    groups: Groups
    options: AttentionOptions
    layout: Layout
    mask: Mask
    signature: Signature
    sizes: cost.Sizes
    passes: tuple[tuple[Schedule, Schedule], ...]
    identity: int
    digest: int
    job: Job
    again: tuple[Recompute, ...]
    choice: Choice | None = None

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
    def schedules(self) -> tuple[Schedule, Schedule]:
        """Of forward and backward; of several chunks of rows those of the first."""
        return self.passes[0]

    @property
    def recompute(self) -> Recompute | None:
        """If calls may run again, and keep something between; of several chunks the first's."""
        return self.again[0] if self.again else None

    @property
    def row_chunks(self) -> tuple[np.ndarray, ...]:
        """Of every chunk the int64 numbers of its rows, ascending: a partition of this rank's
        rows, dimension 0 of q; the same on every rank."""
        rows, options = self.signature[0][0][0], self.options
        return row_chunks(self.layout, rows, options.sequence_chunks, options.row_blocks)

    @property
    def head_chunks(self) -> int:
        """In how many chunks the heads go round the ring; 1: all at once."""
        return self.job.head_chunks

    def traffic(self, side: str | None = None) -> tuple[cost.Traffic, cost.Traffic]:
        """Bytes this rank sends per call, forward and backward; with `side` as if it ran that."""
        groups, sizes = self.groups, self.sizes
        there_bytes, back_bytes = cost.head_traffic(
            groups.ulysses_links, groups.ulysses.rank, sizes, len(self.passes) > 1
        )
        for c, (there, back) in enumerate(self.passes):
            if side not in (None, back.side):
                back = cost.backward_schedule(
                    back.algorithm, back.grid, back.wanted, sizes, side=side, kept=back.kept
                )
            # Of copies: the tables of all ranks are not kept.
            if c == 0 or self.options.visiting == "ring":
                there_bytes += cost.traffic(replace(there), groups.ring.rank, sizes)
            back_bytes += cost.traffic(replace(back), groups.ring.rank, sizes)
        return there_bytes, back_bytes

    @property
    def channels(self) -> list[Channel]:
        """What its messages may travel on, in the order in which their process groups are made."""
        schedules = [*chain(*self.passes), *(each.schedule for each in self.again)]
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
        runs = [run for chunk in self.job.chunks for run in (chunk.forward, chunk.backward)]
        return max(run.held_bytes for run in runs)

    @property
    def longest_message(self) -> int:
        """Bytes, envelope and alignment included, of the longest message that any rank sends."""
        queries, rows = self.row_chunks, self.signature[0][0][0]
        longest = max(map(len, queries)) if len(queries) > 1 else rows  # of a chunk of queries

        def payload(family: str) -> int:
            whole = self.sizes.chunk_bytes(family)
            return whole if family in ("kv", "dkv") or not rows else whole * longest // rows

        families = set().union(*(schedule.families for schedule in self.schedules))
        sizes = [payload(family) for family in families]
        ulysses = self.groups.topology.ulysses
        if ulysses > 1:
            sizes += self.sizes.scattered_bytes(ulysses, again=True)
        tensors = 4  # of a message, at most
        return max(sizes, default=0) + tensors * packing.ALIGNMENT + packing.ENVELOPE

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
                *(f"{name} sent directly" for name, each in zip(("forward", "backward"),
                  zip(*self.passes, strict=True), strict=True)
                  if all(s.route == "direct" for s in each)),
                f"side {self.side}",
                *[f"{self.head_chunks} head chunks"] * (self.head_chunks > 1),
                *[f"{len(self.passes)} chunks of rows{self._visiting}"] * (len(self.passes) > 1),
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

    @property
    def _visiting(self) -> str:
        return ", visiting keys rest on the host" * (self.options.visiting == "host")

    def _why(self) -> str:
        if self.choice is None:
            return ""
        return f" (auto: {self.choice.why}; {self.choice.rates.describe()})"

    def _describe_store(self) -> str:
        if not self.again:
            return "none"
        rank, traffic = self.groups.ring.rank, cost.Traffic()
        for again in self.again:
            traffic += again.traffic(rank, self.sizes)
        imbalance = partial_ring.imbalance(self.again)
        unequal = f", its busiest rank {imbalance:.2f} x the mean" * (imbalance > 1.05)
        return (
            f"{self.again[0].keep:g} ({byte_size(self.store_bytes)} per layer; recompute sends "
            f"{_bytes(traffic)}{unequal})"
        )

    @property
    def store_bytes(self) -> int:
        """Memory that results kept for a recompute take on this rank until backward."""
        sizes = self.sizes
        each = sizes.value_width * sizes.itemsize + sizes.stat_itemsize
        return sum(len(one.run.kept) for one in self.again) * sizes.batch * sizes.heads * each


def _bytes(traffic: cost.Traffic) -> str:
    return f"{byte_size(traffic.intra)} intra + {byte_size(traffic.inter)} inter"

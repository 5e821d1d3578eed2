# SPDX-License-Identifier: Apache-2.0
"""`Plan`: the passes of one rank, the calls for which they are valid, and their costs.

`prepare` makes plans and `attention` runs them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..comm import packing
from ..comm.consensus import Facts
from ..comm.groups import Groups
from ..comm.transport import Channel
from ..execution import key_sums
from ..execution.function import StoredResults
from ..execution.host_keys import KeyHostMemory
from ..execution.rank_plan import RankPlan
from ..execution.row_chunks import RowChunkedCall, check_keys
from ..kernels.base import Kernel
from ..layout import Layout
from ..layout.row_chunks import row_chunks
from ..masks import Mask
from ..options import AttentionOptions
from ..recompute.checkpoint import AttentionStore
from ..schedule import cost
from ..schedule.algorithms import ALGORITHMS
from ..schedule.dry_run import held_bytes
from ..schedule.rings import Schedule
from ..schedule.tables import ROUTES
from .described import described
from .pipeline import RecomputePlan, without_tables
from .validate import (
    NeedsGrad,
    Signature,
    check_max_logits,
    check_shapes,
    check_sink,
    signature,
)

if TYPE_CHECKING:
    from ..autotune.select import Choice


@dataclass(frozen=True)
class Plan:
    """A plan for `mb.attention` on one rank, made by `mb.prepare`.

    Attributes:
        groups: Groups of the calls.
        options: `AttentionOptions` in which every "auto" and default is resolved.
        layout: Layout of q, and of k and v unless `options.key_layout` is set.
        mask: Attention mask.
        signature: (shape, dtype, device) of q, k and v.
        sizes: Sizes of this rank's tensors in its ring, after the all-to-all of ulysses groups.
        passes: Schedules (forward, backward) of every row chunk.
        facts: Values by name on which all ranks agreed.
        identity: Digest of the facts.
        digest: Checksum of all pairs and transfers of the schedules.
        rank_plan: Endpoints, kernel and passes of this rank.
        recomputes: Recomputation plan of every row chunk; empty without a store.
        choice: Settings that algorithm "auto" chose, and the reason; None with another algorithm.
        host_forward: Schedule of the forward that receives the keys for all row chunks into host
            memory, or None.
    """

    groups: Groups
    options: AttentionOptions
    layout: Layout
    mask: Mask
    signature: Signature
    sizes: cost.Sizes
    passes: tuple[tuple[Schedule, Schedule], ...]
    facts: Facts
    identity: int
    digest: int
    rank_plan: RankPlan
    recomputes: tuple[RecomputePlan, ...]
    choice: Choice | None = None
    host_forward: Schedule | None = None

    def matches(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None) -> bool:
        """Return True if the plan is valid for q, k and v.

        Shapes, dtypes and devices must be equal, and every required gradient must be planned.

        Args:
            q: Queries of this rank.
            k: Keys of this rank.
            v: Values of this rank; None if the plan was made with v=None.
        """
        if (v is None) != self.rank_plan.values_are_keys:
            return False
        graph, tensors = torch.is_grad_enabled(), (q, k) if v is None else (q, k, v)
        for t, made_for, planned in zip(
            tensors, self.signature, self.rank_plan.needs_grad, strict=v is not None
        ):
            # Same result as comparing `signature`, but faster: it runs before every call.
            if (tuple(t.shape), t.dtype, str(t.device)) != made_for:
                return False
            if graph and t.requires_grad and not planned:
                return False
        return True

    def check(
        self, q: Any, k: Any, v: Any, sink: torch.Tensor | None, max_logits: torch.Tensor | None
    ) -> None:
        """Check that the plan is valid for a call with these tensors.

        Args:
            q: Argument of `mb.attention`.
            k: Argument of `mb.attention`.
            v: Argument of `mb.attention`.
            sink: Argument of `mb.attention`.
            max_logits: Argument of `mb.attention`.

        Raises:
            ValueError: The plan was made for other tensors, or its kernel does not support the
                call.
        """
        values = k if v is None else v
        if not all(isinstance(t, torch.Tensor) for t in (q, k, values)):
            check_shapes(q, k, values, other_keys=self.options.key_layout is not None)
        if not self.matches(q, k, v):
            made_for, got = (
                " with v=None (values are the keys)" if shared else ""
                for shared in (self.rank_plan.values_are_keys, v is None)
            )
            raise ValueError(
                f"plan: made for {self.signature}{made_for} and gradients of (q, k, v) "
                f"{self.needs_grad}; got {signature(q, k, v)}{got}; call mb.prepare for these "
                "tensors"
            )
        self._check_kernel(q, k, values, sink, max_logits)

    def _check_kernel(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        max_logits: torch.Tensor | None,
    ) -> None:
        if torch.are_deterministic_algorithms_enabled():  # may have been enabled after planning
            kernel = self.kernel
            reason = kernel.refusal(q, k, v) if kernel.deterministic else "is not deterministic"
            if reason is not None:
                raise ValueError(
                    f"plan: kernel {kernel.name} {reason}, and torch.use_deterministic_algorithms("
                    "True) was called; call mb.prepare again"
                )
        if sink is not None:
            check_sink(sink, q)
        if max_logits is None:
            return
        check_max_logits(max_logits, q)
        if not self.kernel.maximum:
            raise ValueError(
                f"max_logits: kernel {self.kernel.name} of this plan does not return the largest "
                "scores; pass max_logits to mb.prepare too"
            )

    def store_entry(self, store: AttentionStore | None, label: object) -> StoredResults | None:
        """Return the entry of a call in the store of a checkpoint; None if the store keeps nothing.

        Args:
            store: Store of the checkpoint around the call, or None.
            label: Argument of `mb.attention`, which identifies the call.

        Raises:
            ValueError: The checkpoint keeps a different fraction of the outputs than the plan.
        """
        if store is None:
            return None
        planned = self.recompute.keep if self.recompute is not None else None
        if store.fraction is None and planned is None:
            return None
        if store.fraction not in (None, planned):
            raise ValueError(
                f"plan: store={planned} differs from the checkpoint around this call, which keeps "
                f"{store.fraction}; use mb.prepare(..., store={store.fraction})"
            )
        return StoredResults(store, (self.call, label))

    def with_kernel(self, kernel: Kernel) -> Plan:
        """Return a copy of the plan with another kernel, which runs the existing kernel plans."""
        return replace(self, rank_plan=replace(self.rank_plan, kernel=kernel))

    def chunked(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None = None,
        label: object = None,
        max_logits: torch.Tensor | None = None,
        host: KeyHostMemory | None = None,
    ) -> RowChunkedCall:
        """Start a call whose queries are passed one row chunk at a time. A collective call.

        Args:
            k: All keys of this rank, [s, b, k, d].
            v: All values of this rank, [s, b, k, w].
            sink: Argument of `mb.attention`.
            label: Argument of `mb.attention`.
            max_logits: Argument of `mb.attention`.
            host: A `mb.HostMemory`, on all ranks or on none. The first forward then receives the
                keys for all row chunks, and later forwards fetch them from host memory. If None,
                every forward receives the keys that its row chunk sees.

        Returns:
            An object whose methods compute row chunks. If ranks share heads, every such object
            sends k and v once when it is made, also an object that is made only for backward.
            `traffic` returns the bytes for one object.

        Raises:
            ValueError: A tensor has another shape, dtype or device, or the plan has a
                `host_refusal`.

        Example:
            >>> import torch
            >>> import megatron_burst as mb
            >>> q, k, v = torch.randn(3, 128, 1, 8, 64).unbind()
            >>> groups = mb.Groups.single()
            >>> plan = mb.prepare(q, k, v, groups=groups, layout="contiguous", sequence_chunks=2)
            >>> call = plan.chunked(k, v)
            >>> results = [call.forward(c, q[rows]) for c, rows in enumerate(plan.row_chunks)]
        """
        self.groups.check()
        if self.rank_plan.values_are_keys:
            raise ValueError(
                "plan: made with v=None (values are the keys), which row chunks do not support; "
                "call mb.prepare with v"
            )
        check_keys(k, v, *self.signature[1:])
        q = k.new_empty(1).expand(self.signature[0][0])  # only its shape, dtype and device are used
        self._check_kernel(q, k, v, sink, max_logits)
        if host is not None and self.host_refusal is not None:
            raise ValueError(f"host: {self.host_refusal}, or remove host")
        keys = k.detach().contiguous(), v.detach().contiguous()
        sink = None if sink is None else sink.detach()
        return RowChunkedCall(
            self.rank_plan, self.groups, self.identity, keys, sink, label, max_logits, host
        )

    @property
    def host_refusal(self) -> str | None:
        """Return why `chunked` cannot use host memory, and what would work; None if it can."""
        if len(self.passes) == 1:
            return "a single row chunk receives its keys once; use sequence_chunks of 2 or more"
        if self.host_forward is None:
            names = ", ".join(name for name, algorithm in ALGORITHMS.items() if algorithm.keeps)
            return (
                f"algorithm {self.algorithm} sends more than keys in forward; use one of {names}, "
                "hybrid or ulysses"
            )
        return None

    @property
    def algorithm(self) -> str:
        """Return the algorithm, with "auto" resolved."""
        return self.options.algorithm

    @property
    def kernel(self) -> Kernel:
        """Return the local attention kernel."""
        return self.rank_plan.kernel

    @property
    def needs_grad(self) -> NeedsGrad:
        """Return three booleans: whether backward computes the gradients of q, k and v."""
        return self.rank_plan.needs_grad

    @property
    def schedules(self) -> tuple[Schedule, Schedule]:
        """Return the schedules (forward, backward) of the first row chunk."""
        return self.passes[0]

    @property
    def recompute(self) -> RecomputePlan | None:
        """Return the recomputation plan of the first row chunk; None without a store."""
        return self.recomputes[0] if self.recomputes else None

    @property
    def row_chunks(self) -> tuple[np.ndarray, ...]:
        """Return the row indices of every row chunk: int64, ascending, the same on all ranks.

        Every row of q (dimension 0) is in exactly one row chunk.
        """
        rows, options = self.signature[0][0][0], self.options
        return row_chunks(self.layout, rows, options.sequence_chunks, options.row_blocks)

    @property
    def head_chunks(self) -> int:
        """Return the number of head chunks."""
        return self.rank_plan.head_chunks

    def traffic(
        self, side: str | None = None, *, host: bool = False
    ) -> tuple[cost.Traffic, cost.Traffic]:
        """Return the bytes that this rank sends per call, in forward and in backward.

        Args:
            side: Tensors that backward sends: "kv" (keys and values) or "query". Default: the side
                of the plan.
            host: True for a call of `chunked` with host memory.

        Raises:
            ValueError: `host` is set and the plan has a `host_refusal`.
        """
        groups, sizes, rank_plan = self.groups, self.sizes, self.rank_plan
        ring_rank = rank_plan.ring.rank
        forward_bytes, backward_bytes = cost.head_traffic(
            rank_plan.ulysses_links, rank_plan.ulysses.rank, sizes, len(self.passes) > 1
        )
        forwards = [forward for forward, _ in self.passes]
        if host:
            if self.host_forward is None:
                raise ValueError(f"host: {self.host_refusal}")
            forwards = [self.host_forward]
        for forward in forwards:
            forward_bytes += cost.traffic(without_tables(forward), ring_rank, sizes)
        if rank_plan.key_sum is not None:
            backward_bytes += cost.key_sum_traffic(rank_plan.key_sum.links, groups.rank, sizes)
        for _, backward in self.passes:
            if side not in (None, backward.side):
                backward = cost.backward_schedule(
                    backward.algorithm, backward.grid, backward.visibility, sizes, side=side
                )
            backward_bytes += cost.traffic(without_tables(backward), ring_rank, sizes)
        return forward_bytes, backward_bytes

    @property
    def channels(self) -> list[Channel]:
        """Return the channels of the plan, in the order in which their process groups are made."""
        schedules = [*chain(*self.passes), *(schedule.schedule for schedule in self.recomputes)]
        if self.host_forward is not None:
            schedules.append(self.host_forward)
        if not self.mask.cacheable:  # documents: the plan of the next batch may use another route
            schedules = [
                replace(schedule, route=route) for schedule in schedules for route in ROUTES
            ]
        routes = (schedule.travels(self.groups.cache)[0] for schedule in schedules)
        channels = [Channel(*channel) for route in routes for channel in route]
        if len(self.rank_plan.ulysses_links) > 1:
            channels.append(Channel("ulysses", False))
        if self.rank_plan.key_sum is not None:
            channels.append(key_sums.CHANNEL)
        return list(dict.fromkeys(channels))

    @property
    def call(self) -> tuple[object, ...]:
        """Return a tuple that identifies an attention call in a checkpoint."""
        return self.signature, self.mask, self.layout, self.options.key_layout

    @property
    def side(self) -> str:
        """Return which tensors backward sends: "kv" (keys and values) or "query"."""
        return self.schedules[1].side

    @property
    def held_bytes(self) -> int:
        """Return this rank's peak bytes of received chunks and of partial results for others."""
        rank, sizes = self.rank_plan.ring.rank, self.sizes
        summed = replace(sizes, wire_itemsize=sizes.stat_itemsize)
        return max(
            held_bytes(without_tables(schedule), rank, summed.row_bytes(schedule))
            for schedule in chain(*self.passes)
        )

    @property
    def longest_message(self) -> int:
        """Return an upper bound for the bytes of a message of any rank, with the envelope."""
        longest = rows = self.signature[0][0][0]
        if len(self.passes) > 1:
            longest = max(map(len, self.row_chunks))

        def payload(family: str) -> int:
            chunk_bytes = self.sizes.chunk_bytes(family)
            return (
                chunk_bytes
                if family in ("kv", "dkv") or not rows
                else chunk_bytes * longest // rows
            )

        families = set().union(
            *(schedule.travels(self.groups.cache)[1] for schedule in self.schedules)
        )
        sizes = [payload(family) for family in families]
        ulysses = len(self.rank_plan.ulysses_links)
        if ulysses > 1:
            sizes += self.sizes.scattered_bytes(ulysses, resends_q=True)
        key_sum = self.rank_plan.key_sum
        if key_sum is not None:
            sizes.append(cost.key_sum_bytes(key_sum.links, self.sizes))
        tensors = 4  # largest number per message
        return max(sizes, default=0) + tensors * packing.ALIGNMENT + packing.ENVELOPE

    def describe(self) -> str:
        """Return one line with the plan's settings and the bytes that this rank sends per layer.

        The line also has the bytes that backward would send with the other side: queries instead of
        keys and values, or vice versa.
        """
        return described(self)

    @property
    def device(self) -> torch.device:
        """Return the device of q, k, v."""
        return torch.device(self.signature[0][2])

    @property
    def store_bytes(self) -> int:
        """Return the bytes that one call on this rank keeps in the store of a checkpoint."""
        sizes = self.sizes
        row_bytes = sizes.value_width * sizes.itemsize + sizes.stat_itemsize
        return (
            sum(len(recompute.rank_pass.kept) for recompute in self.recomputes)
            * sizes.batch
            * sizes.heads
            * row_bytes
        )

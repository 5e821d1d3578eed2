# SPDX-License-Identifier: Apache-2.0
"""What runs, decided and agreed on: a plan, which calls it was made for, and what it costs.

Made by `prepare` and run by `attention`. Decides nothing.
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
from ..execution.function import KeptResults
from ..execution.job import Job
from ..execution.row_chunks import ChunkedCall, check_keys
from ..execution.visiting import Host
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
from .pipeline import Recompute, without_tables
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
    """Everything a call of `attention` on one rank needs besides its tensors, made by `prepare`.

    groups, layout, mask: what it was made for; options: with every "auto" and default resolved;
    choice: why algorithm "auto" took what it took. signature: shapes, dtypes and device of q, k, v.

    host_forward: the forward that brings keys for all row chunks into host memory, None if there is
    none.

    Internal: sizes: this rank's share in its ring. passes: schedules of forward and backward, of
    every row chunk. facts: what all ranks agreed on; identity: its digest; digest: of the tables of
    the schedules. job: what this rank executes. again: what every row chunk recomputes.
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
    job: Job
    again: tuple[Recompute, ...]
    choice: Choice | None = None
    host_forward: Schedule | None = None

    def matches(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
        """Whether it was made for such shapes, dtypes, device and gradients of q, k, v."""
        graph = torch.is_grad_enabled()
        for t, made_for, planned in zip(
            (q, k, v), self.signature, self.job.needs_grad, strict=True
        ):
            # As `signature` has it, without making one: this is asked before every call.
            if (tuple(t.shape), t.dtype, str(t.device)) != made_for:
                return False
            if graph and t.requires_grad and not planned:
                return False
        return True

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
        self._check_rest(q, k, v, sink, max_logits)

    def _check_rest(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        max_logits: torch.Tensor | None,
    ) -> None:
        if torch.are_deterministic_algorithms_enabled():  # perhaps not yet when it was planned
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
                f"max_logits: kernel {self.kernel.name} of this plan cannot tell the largest "
                "scores; pass max_logits to mb.prepare too"
            )

    def keeps(self, store: AttentionStore | None, label: object) -> KeptResults | None:
        """Where the call with this label leaves or finds results: in `store`, that of the
        checkpoint around it.

        Raises ValueError if the checkpoint wants what was not planned.
        """
        if store is None:
            return None
        planned = self.recompute.keep if self.recompute is not None else None
        if store.fraction is None and planned is None:
            return None
        if store.fraction not in (None, planned):
            raise ValueError(
                f"plan: made with store={planned}, and the checkpoint around this call keeps "
                f"{store.fraction}; make it with mb.prepare(..., store={store.fraction})"
            )
        return KeptResults(store, (self.call, label))

    def with_kernel(self, kernel: Kernel) -> Plan:
        """The same plan on another kernel that takes the work of this one's; for measuring."""
        return replace(self, job=replace(self.job, kernel=kernel))

    def chunked(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None = None,
        label: object = None,
        max_logits: torch.Tensor | None = None,
        host: Host | None = None,
    ) -> ChunkedCall:
        """A call whose queries come one row chunk at a time, see `ChunkedCall`; a collective.

        k, v of this rank's whole shard, as the plan was made for; sink, label, max_logits as
        `mb.attention` takes them. host: `mb.HostMemory`, on all ranks or on none: the first forward
        receives the keys for all row chunks, and later ones fetch them from there; None: every
        forward receives the keys that its row chunk sees. Bytes are those of `traffic`; where ranks
        share heads and the backward is that of another call, that call sends k and v again. Raises
        ValueError for tensors of other shapes, and for a host if the plan has a `host_refusal`.
        """
        self.groups.check()
        check_keys(k, v, *self.signature[1:])
        q = k.new_empty(1).expand(self.signature[0][0])  # stands in for that of all chunks
        self._check_rest(q, k, v, sink, max_logits)
        if host is not None and self.host_refusal is not None:
            raise ValueError(f"host: {self.host_refusal}; or leave host out")
        keys = k.detach().contiguous(), v.detach().contiguous()
        sink = None if sink is None else sink.detach()
        return ChunkedCall(
            self.job, self.groups, self.identity, keys, sink, label, max_logits, host
        )

    @property
    def host_refusal(self) -> str | None:
        """The reason why `chunked` takes no host memory, with what would work; None if it does."""
        if len(self.passes) == 1:
            return "keys of one row chunk are received once; use sequence_chunks of 2 or more"
        if self.host_forward is None:
            able = ", ".join(name for name, each in ALGORITHMS.items() if each.keeps)
            return (
                f"algorithm {self.algorithm} sends more than keys in forward; use one of {able}, "
                "hybrid or ulysses"
            )
        return None

    @property
    def algorithm(self) -> str:
        """The algorithm that runs."""
        return self.options.algorithm

    @property
    def kernel(self) -> Kernel:
        """The kernel that runs."""
        return self.job.kernel

    @property
    def needs_grad(self) -> NeedsGrad:
        """Which of q, k, v the backward makes gradients of."""
        return self.job.needs_grad

    @property
    def schedules(self) -> tuple[Schedule, Schedule]:
        """The schedules of forward and backward; with several row chunks those of the first."""
        return self.passes[0]

    @property
    def recompute(self) -> Recompute | None:
        """If calls may run again, and keep something between; of several chunks the first's."""
        return self.again[0] if self.again else None

    @property
    def row_chunks(self) -> tuple[np.ndarray, ...]:
        """The rows of every row chunk, int64, ascending: a partition of dimension 0 of q, the same
        on every rank.
        """
        rows, options = self.signature[0][0][0], self.options
        return row_chunks(self.layout, rows, options.sequence_chunks, options.row_blocks)

    @property
    def head_chunks(self) -> int:
        """Number of head chunks."""
        return self.job.head_chunks

    def traffic(
        self, side: str | None = None, *, host: bool = False
    ) -> tuple[cost.Traffic, cost.Traffic]:
        """Return the bytes that this rank sends per call, forward and backward.

        Args:
            side: Side of backward; None for that of the plan.
            host: Whether the call is one of `chunked` with host memory.

        Raises:
            ValueError: `host` for a plan that takes no host memory (`host_refusal`).
        """
        groups, sizes = self.groups, self.sizes
        forward_bytes, backward_bytes = cost.head_traffic(
            groups.ulysses_links, groups.ulysses.rank, sizes, len(self.passes) > 1
        )
        forwards = [forward for forward, _ in self.passes]
        if host:
            if self.host_forward is None:
                raise ValueError(f"host: {self.host_refusal}")
            forwards = [self.host_forward]
        for forward in forwards:
            forward_bytes += cost.traffic(without_tables(forward), groups.ring.rank, sizes)
        for _, backward in self.passes:
            if side not in (None, backward.side):
                backward = cost.backward_schedule(
                    backward.algorithm, backward.grid, backward.visibility, sizes, side=side
                )
            backward_bytes += cost.traffic(without_tables(backward), groups.ring.rank, sizes)
        return forward_bytes, backward_bytes

    @property
    def channels(self) -> list[Channel]:
        """What its messages may travel on, in the order in which their process groups are made."""
        schedules = [*chain(*self.passes), *(each.schedule for each in self.again)]
        if self.host_forward is not None:
            schedules.append(self.host_forward)
        if not self.mask.cacheable:  # documents: the next batch may take the other route
            schedules = [replace(each, route=route) for each in schedules for route in ROUTES]
        found = (each.travels(self.groups.cache)[0] for each in schedules)
        channels = [Channel(*each) for ways in found for each in ways]
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
    def held_bytes(self) -> int:
        """Peak bytes of chunks of other ranks and their partial results."""
        rank, sizes = self.groups.ring.rank, self.sizes
        summed = replace(sizes, wire_itemsize=sizes.stat_itemsize)
        return max(
            held_bytes(without_tables(each), rank, summed.row_bytes(each))
            for each in chain(*self.passes)
        )

    @property
    def longest_message(self) -> int:
        """Bytes, envelope and alignment included, of the longest message that any rank sends."""
        longest = rows = self.signature[0][0][0]
        if len(self.passes) > 1:
            longest = max(map(len, self.row_chunks))  # of a chunk of queries

        def payload(family: str) -> int:
            whole = self.sizes.chunk_bytes(family)
            return whole if family in ("kv", "dkv") or not rows else whole * longest // rows

        families = set().union(*(x.travels(self.groups.cache)[1] for x in self.schedules))
        sizes = [payload(family) for family in families]
        ulysses = self.groups.topology.ulysses
        if ulysses > 1:
            sizes += self.sizes.scattered_bytes(ulysses, resends_q=True)
        tensors = 4  # of a message, at most
        return max(sizes, default=0) + tensors * packing.ALIGNMENT + packing.ENVELOPE

    def describe(self) -> str:
        """One line: choices, bytes per layer and rank, and the bytes of the other side."""
        return described(self)

    @property
    def device(self) -> torch.device:
        """The device of q, k, v."""
        return torch.device(self.signature[0][2])

    @property
    def store_bytes(self) -> int:
        """Bytes of the attention store."""
        sizes = self.sizes
        each = sizes.value_width * sizes.itemsize + sizes.stat_itemsize
        return sum(len(one.run.kept) for one in self.again) * sizes.batch * sizes.heads * each

# SPDX-License-Identifier: Apache-2.0
"""`mb.prepare`: from the arguments of a call of attention to a plan on which all ranks agree.

`AttentionOperation` describes the call, and `comm/operation.py` runs the steps. `validate` checks
arguments, `automatic` resolves "auto", `pipeline` makes what each rank runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import Unpack

from ..comm.consensus import Facts, identity
from ..comm.groups import Groups, check_groups
from ..comm.operation import Operation, prepared
from ..execution.job import Job
from ..layout.layouts import Shards
from ..options import AttentionKeywords, AttentionOptions
from ..schedule.cost import Sizes, ring_spans
from ..schedule.head_shares import deferred_chunks
from .pipeline import Passes, passes
from .plan import Plan
from .stand_ins import TensorShapes, of_shape
from .validate import NeedsGrad, Request, check, signature

if TYPE_CHECKING:
    from ..autotune.rates import Rates

WORKS_KEPT = 8  # of each grid, what plans of masks that stay have of the ring: kinds of layers


def prepare(
    q: torch.Tensor | None = None,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    groups: Groups | None,
    shape: Sequence[int] | None = None,
    kv_heads: int | None = None,
    value_width: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    needs_grad: NeedsGrad | None = None,
    sink: torch.Tensor | None = None,
    max_logits: torch.Tensor | None = None,
    rates: Rates | None = None,
    **options: Unpack[AttentionKeywords],
) -> Plan:
    """Check the arguments of `attention`, on all ranks alike, and resolve every "auto".

    Collective: every rank of `groups` must call it (one all-gather of 1.3 KB per rank on the host;
    two with algorithm "auto", which measures once what `rates` does not state; the first plan on a
    ring makes its process groups). Make one plan per micro-batch and use it in every layer of the
    same shapes.

    q [s, b, h, d], k [s, b, k, d], v [s, b, k, w]: only shapes, dtypes, device and `requires_grad`
    are read. In their place `shape`, that of q on this rank, with kv_heads (as many as query heads,
    if not given), value_width (that of q), dtype and device (torch's defaults); q, k and v then
    need gradients unless needs_grad says otherwise. options: the fields of `AttentionOptions`.
    needs_grad: which of q, k, v need a gradient, where the tensors do not say so (a plan may
    foresee gradients that a call does not need). sink, max_logits: checked with the rest, and not
    kept: they are given to each call; with max_logits, kernel "auto" is one that can tell the
    largest scores. rates: of links and device, for algorithm "auto". Raises the same ValueError on
    every rank.
    """
    check_groups(groups)
    assert groups is not None
    shapes, beside = None, (shape, kv_heads, value_width, dtype, device)
    if q is k is v is None or any(x is not None for x in beside):
        shapes = TensorShapes(*beside)
        needs_grad = (True, True, True) if needs_grad is None else needs_grad
    operation = AttentionOperation(
        groups=groups, tensors=(q, k, v), shapes=shapes, options=AttentionOptions(**options),
        needs_grad=needs_grad, sink=sink, max_logits=max_logits, rates=rates,
    )  # fmt: skip
    return prepared(operation)


class RingOperation(Operation[Request, Plan]):
    """A call that runs in the ring of attention on one rank."""

    groups: Groups

    def agree(self, facts: Facts | ValueError) -> None:
        self.groups.agree(facts)

    def build(self, request: Request) -> Plan:
        groups, options, (q, k, _) = self.groups, request.options, request.tensors
        sizes = request.sizes.shared(groups.topology.ulysses)
        spans = ring_spans(request.layout, groups.topology, q.shape[0] * groups.size)
        made = _passes(request, groups, sizes, spans)
        job = Job(
            ring=groups.ring, ulysses=groups.ulysses, ulysses_links=groups.ulysses_links,
            kernel=request.kernel, scoring=request.scoring, wire_dtype=request.wire_dtype,
            needs_grad=request.needs_grad, heads=q.shape[2], kv_heads=k.shape[2],
            head_chunks=options.head_chunks or 1, chunks=made.chunks, order=made.order,
        )  # fmt: skip
        # Nothing else would tell ranks whose tables differ where messages bear no envelope.
        facts = request.facts | {"schedule": made.digest}
        return Plan(
            groups=groups, options=options, layout=request.layout, mask=request.mask,
            signature=signature(*request.tensors), sizes=sizes, passes=made.schedules, facts=facts,
            identity=identity(facts), digest=made.digest, job=job, again=made.again,
            choice=request.choice, host_forward=made.host_forward,
        )  # fmt: skip

    def connect(self, plan: Plan) -> None:
        self.groups.connect(plan.channels, plan.device)
        self.groups.expect(plan.longest_message)


@dataclass(frozen=True, kw_only=True)
class AttentionOperation(RingOperation):
    """A call of attention on one rank, as of `prepare`; shapes: in place of q, k, v, or None."""

    groups: Groups
    tensors: Sequence[Any]
    shapes: TensorShapes | None
    options: AttentionOptions
    needs_grad: NeedsGrad | None
    sink: torch.Tensor | None
    max_logits: torch.Tensor | None
    rates: Rates | None

    def check(self) -> Request:
        self.groups.check()
        q, k, v = self.tensors
        if self.shapes is not None:
            q, k, v = of_shape(self.tensors, self.shapes)
        return check(
            (q, k, v), self.groups, self.options, self.needs_grad, self.sink, self.max_logits,
            self.rates,
        )  # fmt: skip

    @property
    def measures(self) -> bool:
        return self.options.algorithm == "auto"

    def choose(self, request: Request) -> Request | ValueError:
        from .automatic import resolve  # with the simulator, which no other call needs

        return resolve(request, self.groups, self.rates)


def _passes(request: Request, groups: Groups, sizes: Sizes, spans: Shards) -> Passes:
    """Return the passes of this rank, from the cache if the mask stays the same."""
    if not request.mask.cacheable:
        return passes(request, groups, sizes, spans)
    options = request.options  # every micro-batch asks for the same
    key = (request.kernel.name, request.tensors[0].device, request.mask, request.layout,
           tuple(map(tuple, spans)), sizes,
           options.algorithm, options.side, options.store,
           options.sequence_chunks, options.row_blocks,
           deferred_chunks(options.head_chunks or 1) > 0)  # fmt: skip
    works = groups.recent("works", WORKS_KEPT)
    made = works.find(key)
    if made is None:
        made = works.keep(key, passes(request, groups, sizes, spans))
    return made

# SPDX-License-Identifier: Apache-2.0
"""`mb.prepare`: make a plan for attention on which all ranks agree.

`AttentionOperation` describes the call, and `comm/operation.py` runs the steps. `validate` checks
arguments, `automatic` resolves "auto", and `pipeline` makes the passes of this rank.
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
from ..execution.rank_plan import KeySum, RankPlan
from ..layout import Replicated
from ..options import AttentionKeywords, AttentionOptions
from ..schedule.head_shares import deferred_chunks
from .pipeline import PlannedPasses, RingRequest, passes
from .plan import Plan
from .stand_ins import TensorShapes, of_shape
from .validate import NeedsGrad, Request, check, signature

if TYPE_CHECKING:
    from ..autotune.rates import Rates

WORKS_KEPT = 8  # cached passes per grid: kinds of layers whose mask does not depend on the batch


def prepare(
    q: torch.Tensor | None = None,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    groups: Groups | None,
    shape: Sequence[int] | None = None,
    kv_heads: int | None = None,
    value_width: int | None = None,
    key_rows: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    needs_grad: NeedsGrad | None = None,
    sink: torch.Tensor | None = None,
    max_logits: torch.Tensor | None = None,
    rates: Rates | None = None,
    **options: Unpack[AttentionKeywords],
) -> Plan:
    """Make a plan for `mb.attention`: check the arguments on all ranks and resolve every "auto".

    This is a collective call: every rank of `groups` must call it. Each rank sends 1.3 KB to the
    other ranks on the host, and twice as much with algorithm "auto". The first plan for a ring
    makes the process groups of the ring. Make one plan per micro-batch and use it for every layer
    with the same shapes.

    Pass either q, k and v, or `shape` with `kv_heads`, `value_width`, `key_rows`, `dtype` and
    `device`.

    Args:
        q: Queries of this rank, [s, b, h, d]. Of q, k and v, only shapes, dtypes, device and
            `requires_grad` are read.
        k: Keys of this rank, [s, b, k, d]; k divides h. With option `key_layout`, [t, b, k, d] with
            t key rows.
        v: Values of this rank, [s, b, k, w] or [t, b, k, w]. If v is None and q and k are tensors,
            values are the keys, which are then sent once.
        groups: Ranks over which the sequence is split.
        shape: Shape of q on this rank, (s, b, h, d), if there are no tensors yet.
        kv_heads: Number of key/value heads. Default: the number of query heads.
        value_width: Width of v. Default: d.
        key_rows: Number of rows of k and v on this rank, with option `key_layout`. Default: s.
        dtype: dtype of the tensors. Default: torch's default dtype.
        device: Device of the tensors. Default: torch's default device.
        needs_grad: Three booleans, whether q, k and v need a gradient. A call may need fewer
            gradients. Default: `requires_grad` of the tensors; with `shape`, all True.
        sink: Sink that the calls will pass. `prepare` only checks it; pass it to each call too.
        max_logits: Buffer that the calls will pass. `prepare` only checks it; pass it to each call
            too. With `max_logits`, kernel "auto" picks a kernel that returns the largest scores.
        rates: Link and compute rates for algorithm "auto". Default: measured once per `groups`.
        **options: Fields of `mb.options.AttentionOptions`.

    Returns:
        The plan of this rank.

    Raises:
        ValueError: An argument is not supported, or ranks passed different arguments. Every rank
            raises the same error.

    Example:
        >>> import torch
        >>> import megatron_burst as mb
        >>> plan = mb.prepare(shape=(128, 1, 8, 64), kv_heads=2, groups=mb.Groups.single())
        >>> q, k, v = (torch.randn(128, 1, heads, 64) for heads in (8, 2, 2))
        >>> out = mb.attention(q, k, v, plan=plan)
    """
    check_groups(groups)
    assert groups is not None
    shapes, shape_arguments = None, (shape, kv_heads, value_width, key_rows, dtype, device)
    if q is k is v is None or any(x is not None for x in shape_arguments):
        shapes = TensorShapes(*shape_arguments)
        needs_grad = (True, True, True) if needs_grad is None else needs_grad
    operation = AttentionOperation(
        groups=groups, tensors=(q, k, v), shapes=shapes, options=AttentionOptions(**options),
        needs_grad=needs_grad, sink=sink, max_logits=max_logits, rates=rates,
    )  # fmt: skip
    return prepared(operation)


class RingOperation(Operation[Request, Plan]):
    """Base class of operations that send chunks around a ring: softmax and sparse attention."""

    groups: Groups

    def agree(self, facts: Facts | ValueError) -> None:
        self.groups.agree(facts)

    def build(self, request: Request) -> Plan:
        groups, options, (q, k, _) = self.groups, request.options, request.tensors
        ring = RingRequest.of(request, groups)
        passes = _passes(ring, groups)
        key_sum = None
        if isinstance(request.key_layout, Replicated):
            key_sum = _key_sum(request.key_layout, groups)
        rank_plan = RankPlan(
            ring=ring.place.ring, ulysses=ring.place.ulysses,
            ulysses_links=ring.place.ulysses_links,
            kernel=request.kernel, scoring=request.scoring, wire_dtype=request.wire_dtype,
            needs_grad=request.needs_grad, heads=q.shape[2], kv_heads=k.shape[2],
            head_chunks=options.head_chunks or 1, chunks=passes.chunks,
            key_order=passes.key_order, key_sum=key_sum, values_are_keys=request.values_are_keys,
        )  # fmt: skip
        # Messages on CUDA have no envelope, so only this fact detects ranks with other tables.
        facts = request.facts | {"schedule": passes.digest}
        return Plan(
            groups=groups, options=options, layout=request.layout, mask=request.mask,
            signature=signature(*request.tensors), sizes=ring.sizes, passes=passes.schedules,
            facts=facts, identity=identity(facts), digest=passes.digest, rank_plan=rank_plan,
            recomputes=passes.recomputes, choice=request.choice, host_forward=passes.host_forward,
        )  # fmt: skip

    def connect(self, plan: Plan) -> None:
        self.groups.connect(plan.channels, plan.device)
        self.groups.expect(plan.longest_message)


@dataclass(frozen=True, kw_only=True)
class AttentionOperation(RingOperation):
    """A call of attention on one rank, with the arguments of `prepare`.

    Attributes:
        groups: Argument of `prepare`.
        tensors: q, k and v; v is None if values are the keys. All three are None if `shapes` is
            set.
        shapes: Shapes that replace q, k and v; None if tensors are set.
        options: Options of the call.
        needs_grad: Argument of `prepare`.
        sink: Argument of `prepare`.
        max_logits: Argument of `prepare`.
        rates: Argument of `prepare`.
    """

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
        options = self.options
        replicated = options.key_layout == "replicated" or isinstance(
            options.key_layout, Replicated
        )
        return options.algorithm == "auto" and not replicated

    def choose(self, request: Request) -> Request | ValueError:
        from .automatic import resolve  # imports the simulator, which only "auto" needs

        return resolve(request, self.groups, self.rates)


def _key_sum(key_layout: Replicated, groups: Groups) -> KeySum | None:
    """Return the ranks that sum the gradients of replicated keys; None if ranks do not sum them."""
    if not key_layout.sum_gradients or groups.size == 1:
        return None
    links = tuple(groups.topology.link(groups.rank, peer) for peer in range(groups.size))
    return KeySum(groups.grid, links)


def _passes(ring: RingRequest, groups: Groups) -> PlannedPasses:
    """Return the passes of this rank, from the cache of `groups` if they are in it.

    Passes are cached only if the mask does not depend on the batch.
    """
    request = ring.request
    if not request.mask.cacheable:
        return passes(ring)
    options = request.options
    key = (request.kernel.name, request.tensors[0].device, request.mask, request.layout,
           request.key_layout, tuple(map(tuple, ring.queries)), ring.sizes,
           options.algorithm, options.side, options.store,
           options.sequence_chunks, options.row_blocks,
           deferred_chunks(options.head_chunks or 1) > 0, request.relay_stream)  # fmt: skip
    cached_passes = groups.recent("works", WORKS_KEPT)
    ring_passes = cached_passes.find(key)
    if ring_passes is None:
        ring_passes = cached_passes.keep(key, passes(ring))
    return ring_passes

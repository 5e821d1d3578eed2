# SPDX-License-Identifier: Apache-2.0
"""Rows of any rank to any rank, and their gradients home again.

What moves where is a `Route`. Decides that what goes to one rank is one message, that a row whose
copies went to several places gets the sum of their gradients in float32 (float64 for float64), and
that gradients travel in the dtype of their rows.

Shape letters: s local rows; r rows of the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from zlib import crc32

import torch

from ..layout.routes import Route
from ..layout.sharding import to_device
from . import packing
from .groups import Groups
from .packing import CallTag, Envelope, Shapes
from .transport import Channel, Send, Tensors, exchanged

GRID = Channel("grid", False)


class Paths(NamedTuple):
    """A `Route` whose numbers of rows lie on a device, int64."""

    sends: tuple[torch.Tensor, ...]
    receives: tuple[torch.Tensor, ...]
    rows: int


def paths(route: Route | Paths, device: torch.device) -> Paths:
    """The route with its numbers on the device."""

    def there(rows: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        return tuple(
            each.to(device) if isinstance(each, torch.Tensor) else to_device(each, device)
            for each in rows
        )

    return Paths(there(route.sends), there(route.receives), route.rows)


def exchange_rows(
    tensors: Sequence[torch.Tensor],
    route: Route | Paths,
    groups: Groups,
    identity: int = 0,
    label: object = None,
) -> tuple[torch.Tensor, ...]:
    """Several tensors whose rows, along dimension 0, go where `route` says: one message per rank.

    tensors: this rank's, [s, ...] each, of any dtypes; route: this rank's (`paths` on the device of
    the tensors save a copy per call). Returns as many, [r, ...] each, zero where nobody sends.
    identity: a digest of what the ranks agreed on; label: as of `mb.attention`. Collective over the
    grid, as its backward is. The caller has made the channel, `groups.connect([GRID], device)`, and
    said how long a message may be, `groups.expect`.

    Differentiable, any number of times. RuntimeError if a rank died or is out of step.
    """
    groups.check()
    moves = paths(route, tensors[0].device)
    job = _Job(groups, moves, groups.calls.forward(identity, label, False))
    return _Rows.apply(job, *tensors)  # pyright: ignore[reportReturnType]


def over_grid(
    groups: Groups,
    sent: Mapping[int, Tensors],
    wanted: Mapping[int, Shapes],
    device: torch.device,
    call: CallTag,
    label: str,
) -> dict[int, Tensors]:
    """What came from each rank of the grid, of the shapes `wanted` of it, while `sent` went there;
    label: what this exchange of the call is, the same on every rank.
    """
    link, me = groups.topology.link, groups.rank
    sends = [Send(peer, link(me, peer), tensors) for peer, tensors in sent.items()]
    envelope = Envelope(call, crc32(label.encode()))
    return exchanged(groups.grid, GRID, sends, wanted, device, envelope, label)


def longest(rows: int, tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of a message with so many rows of each of these tensors."""
    sizes = [t[:1].numel() * t.element_size() if len(t) else 0 for t in tensors]
    return sum(rows * size + packing.ALIGNMENT for size in sizes) + packing.ENVELOPE


@dataclass(frozen=True)
class _Job:
    """One rank's part of an exchange; home: rows of the shard that gradients go back to, or None
    for the way there.
    """

    groups: Groups
    paths: Paths
    call: CallTag
    home: int | None = None

    def turned(self, rows: int) -> _Job:
        """The exchange that carries the gradients of this one."""
        there, home = self.paths, rows if self.home is None else None
        return replace(self, paths=Paths(there.receives, there.sends, rows), home=home)


class _Rows(torch.autograd.Function):
    """The exchange of a job; its backward is the exchange of the turned job."""

    @staticmethod
    def forward(ctx: Any, job: _Job, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.job = job.turned(len(tensors[0]))
        with job.groups.running():
            return tuple(_move(job, tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.job.groups.check()
        ctx.job.groups.calls.backward(ctx.job.call)
        return None, *_Rows.apply(ctx.job, *gradients)  # pyright: ignore


def _move(job: _Job, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """One rank's exchange."""
    sends, receives, rows = job.paths
    parts = [
        [t.index_select(0, numbers) if len(numbers) else t[:0] for t in tensors]
        for numbers in sends
    ]
    arrived = _exchange(job, parts, [len(numbers) for numbers in receives])
    sums = [_sums_in(t.dtype) if job.home is not None else t.dtype for t in tensors]
    results = [
        t.new_zeros((rows, *t.shape[1:]), dtype=s) for t, s in zip(tensors, sums, strict=True)
    ]
    for numbers, some in zip(receives, arrived, strict=True):
        if len(numbers):
            for result, came in zip(results, some, strict=True):
                result.index_add_(0, numbers, came.to(result.dtype))
    return [result.to(t.dtype) for result, t in zip(results, tensors, strict=True)]


def _exchange(
    job: _Job, parts: list[list[torch.Tensor]], wanted: list[int]
) -> list[Sequence[torch.Tensor]]:
    """What came from each rank: `wanted` rows of each tensor, or nothing."""
    me = job.groups.rank
    own, others = parts[me], [peer for peer in range(len(parts)) if peer != me]
    shapes = {
        peer: [(torch.Size((wanted[peer], *t.shape[1:])), t.dtype) for t in own]
        for peer in others
        if wanted[peer]
    }
    sent = {peer: parts[peer] for peer in others if len(parts[peer][0])}
    way = "rows there" if job.home is None else "gradients of rows home"
    arrived = over_grid(job.groups, sent, shapes, own[0].device, job.call, way)
    nothing = [t[:0] for t in own]
    return [own if peer == me else arrived.get(peer, nothing) for peer in range(len(parts))]


def _sums_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32

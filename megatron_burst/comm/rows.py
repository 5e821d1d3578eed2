# SPDX-License-Identifier: Apache-2.0
"""Differentiable exchange of rows between ranks; backward sends the gradients of rows back.

A `Route` lists the rows that one rank sends to each rank and receives from each rank. All rows for
one rank are one message. If a row was sent to several ranks, its gradients are summed in float32
(float64 rows in float64). Gradients are sent in the dtype of their rows.

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


class DeviceRoute(NamedTuple):
    """A `Route` whose row indices are int64 tensors on a device.

    Attributes:
        sends: For each destination rank: indices of the rows that this rank sends.
        receives: For each source rank: indices of the result rows to which the received rows are
            added.
        rows: Number of rows of the result.
    """

    sends: tuple[torch.Tensor, ...]
    receives: tuple[torch.Tensor, ...]
    rows: int


def route_on_device(route: Route | DeviceRoute, device: torch.device) -> DeviceRoute:
    """Copy the row indices of a route to a device."""

    def move(all_numbers: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        return tuple(
            numbers.to(device) if isinstance(numbers, torch.Tensor) else to_device(numbers, device)
            for numbers in all_numbers
        )

    return DeviceRoute(move(route.sends), move(route.receives), route.rows)


def exchange_rows(
    tensors: Sequence[torch.Tensor],
    route: Route | DeviceRoute,
    groups: Groups,
    identity: int = 0,
    label: object = None,
) -> tuple[torch.Tensor, ...]:
    """Exchange rows (dimension 0) of several tensors by a route, with one message per rank.

    Forward and backward are collective calls of all ranks of the grid. Gradients of any order are
    supported. The caller must have called `groups.connect([GRID], device)`, and `groups.expect`
    with the size in bytes of the longest message on any rank.

    Args:
        tensors: Tensors of this rank, [s, ...] each, of any dtypes.
        route: Route of this rank. A `DeviceRoute` avoids a copy to the device per call.
        groups: Groups of the ranks.
        identity: Hash of the arguments on which all ranks agreed, such as `LinearPlan.identity`.
            Messages on the CPU contain it, so that a receiver detects a message of another plan.
        label: Same as in `mb.attention`.

    Returns:
        One tensor [r, ...] for each tensor of `tensors`; rows that no rank sends are zero.

    Raises:
        RuntimeError: A rank died or is out of step.
    """
    groups.check()
    device_route = route_on_device(route, tensors[0].device)
    exchange = _RankExchange(groups, device_route, groups.calls.forward(identity, label, False))
    return _ExchangeRows.apply(exchange, *tensors)  # pyright: ignore[reportReturnType]


def over_grid(
    groups: Groups,
    sent: Mapping[int, Tensors],
    expected: Mapping[int, Shapes],
    device: torch.device,
    call: CallTag,
    label: str,
) -> dict[int, Tensors]:
    """Send tensors to ranks of the grid; return the received tensors by rank.

    Args:
        groups: Groups of the ranks.
        sent: Tensors to send, by rank.
        expected: Shapes and dtypes to receive, by rank.
        device: Device of the tensors.
        call: Tag of the call; messages on the CPU contain it.
        label: Name of this exchange in the call, equal on all ranks.
    """
    link, me = groups.topology.link, groups.rank
    sends = [Send(peer, link(me, peer), tensors) for peer, tensors in sent.items()]
    envelope = Envelope(call, crc32(label.encode()))
    return exchanged(groups.grid, GRID, sends, expected, device, envelope, label)


def longest(rows: int, tensors: Sequence[torch.Tensor]) -> int:
    """Return an upper bound for the bytes of a message with `rows` rows of each tensor."""
    sizes = [t[:1].numel() * t.element_size() if len(t) else 0 for t in tensors]
    return sum(rows * size + packing.ALIGNMENT for size in sizes) + packing.ENVELOPE


@dataclass(frozen=True)
class _RankExchange:
    """One rank's part of an exchange, in forward or in backward.

    Attributes:
        groups: Groups of the ranks.
        route: Rows that this rank sends and receives.
        call: Tag of the call.
        home: None in forward. In backward, the number of rows that this rank passed to forward.
    """

    groups: Groups
    route: DeviceRoute
    call: CallTag
    home: int | None = None

    def reversed(self, rows: int) -> _RankExchange:
        """Return the exchange in the other direction; its result has `rows` rows.

        The reverse of a forward exchange sends the gradients of the result.
        """
        forward_route, home = self.route, rows if self.home is None else None
        return replace(
            self, route=DeviceRoute(forward_route.receives, forward_route.sends, rows), home=home
        )


class _ExchangeRows(torch.autograd.Function):
    """Autograd function of an exchange; its backward is the exchange in the other direction."""

    @staticmethod
    def forward(
        ctx: Any, exchange: _RankExchange, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.exchange = exchange.reversed(len(tensors[0]))
        with exchange.groups.running():
            return tuple(_move(exchange, tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.exchange.groups.check()
        ctx.exchange.groups.calls.backward(ctx.exchange.call)
        return None, *_ExchangeRows.apply(ctx.exchange, *gradients)  # pyright: ignore


def _move(exchange: _RankExchange, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    sends, receives, rows = exchange.route
    parts = [
        [t.index_select(0, numbers) if len(numbers) else t[:0] for t in tensors]
        for numbers in sends
    ]
    by_rank = _exchange(exchange, parts, [len(numbers) for numbers in receives])
    sums = [_sums_in(t.dtype) if exchange.home is not None else t.dtype for t in tensors]
    results = [
        t.new_zeros((rows, *t.shape[1:]), dtype=s) for t, s in zip(tensors, sums, strict=True)
    ]
    for numbers, received in zip(receives, by_rank, strict=True):
        if len(numbers):
            for result, source in zip(results, received, strict=True):
                result.index_add_(0, numbers, source.to(result.dtype))
    return [result.to(t.dtype) for result, t in zip(results, tensors, strict=True)]


def _exchange(
    exchange: _RankExchange, parts: list[list[torch.Tensor]], row_counts: list[int]
) -> list[Sequence[torch.Tensor]]:
    """Exchange rows; return, for each rank, the received rows of each tensor."""
    me = exchange.groups.rank
    own, peers = parts[me], [peer for peer in range(len(parts)) if peer != me]
    shapes = {
        peer: [(torch.Size((row_counts[peer], *t.shape[1:])), t.dtype) for t in own]
        for peer in peers
        if row_counts[peer]
    }
    sent = {peer: parts[peer] for peer in peers if len(parts[peer][0])}
    title = "rows" if exchange.home is None else "gradients of rows"
    arrived = over_grid(exchange.groups, sent, shapes, own[0].device, exchange.call, title)
    nothing = [t[:0] for t in own]
    return [own if peer == me else arrived.get(peer, nothing) for peer in range(len(parts))]


def _sums_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32

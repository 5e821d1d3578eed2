# SPDX-License-Identifier: Apache-2.0
"""Exchange of rows around softmax attention, if attention and tokens have different layouts.

In the contiguous layout, a state of linear attention visits every rank once. In the zigzag layout,
every rank has equal work in causal attention. Only the tensors of attention are exchanged: rows of
q, k and v are sent to the ranks that hold them in attention's layout, and rows of the output are
sent back. Rotary positions are applied before the exchange.

Shape letters: s local rows, the same number in both layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from zlib import crc32

import torch

from ...comm import rows
from ...comm.groups import Groups
from ...comm.recent import RecentCache
from ...layout import Layout, routes
from ...layout import make as make_layout
from ...units import byte_size
from ..data.cut import BatchCut
from ..data.packed import Pack

EXCHANGES_KEPT = 64  # exceeds packed micro-batches in flight


class RowExchange(NamedTuple):
    """The exchanges of this rank's rows before and after attention.

    Attributes:
        groups: The grid.
        outbound: Route of this rank's rows from the layout of the tokens to attention's layout.
        inbound: Route of this rank's rows from attention's layout to the layout of the tokens.
        identity: A checksum of the layouts and the documents, which ranks compare.
    """

    groups: Groups
    outbound: rows.DeviceRoute
    inbound: rows.DeviceRoute
    identity: int

    def to_attention(self, tensors: tuple[torch.Tensor, ...], label: int) -> Any:
        """Exchange q, k, v [s, b, ...] to the layout of attention; a collective of `groups`."""
        return rows.exchange_rows(tensors, self.outbound, self.groups, self.identity, label)

    def to_stream(self, out: torch.Tensor, label: int) -> torch.Tensor:
        """Exchange attention's output [s, b, ...] to the layout of the tokens; a collective."""
        return rows.exchange_rows((out,), self.inbound, self.groups, self.identity, label)[0]


class RowExchanges:
    """Cache of the `EXCHANGES_KEPT` last used row exchanges of one grid."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._recent = RecentCache(EXCHANGES_KEPT)

    def exchange(
        self,
        stream: BatchCut,
        attention: BatchCut,
        pack: Pack | None,
        tensors: Sequence[torch.Tensor],
    ) -> RowExchange:
        """Return the exchange for q, k, v [s, ...] of a batch.

        The first call is a collective that creates the communicator of the exchanges.

        Args:
            stream: how the run cuts batches.
            attention: how attention cuts sequences.
            pack: the documents of a packed batch, or None.
            tensors: q, k, v; only shapes, dtypes and device are read.
        """
        groups, device, local = self._groups, tensors[0].device, tensors[0].shape[0]
        groups.connect([rows.GRID], device)
        groups.expect(rows.longest(local, tensors))

        def make() -> RowExchange:
            both_routes = _routes(groups, stream, attention, pack, local)
            facts = repr((stream.name, attention.name, pack and pack.cut_key, local))
            outbound, inbound = (rows.route_on_device(route, device) for route in both_routes)
            return RowExchange(groups, outbound, inbound, crc32(facts.encode()))

        return self._recent.of((stream, attention, pack and pack.cut_key, local, device), make)


def exchange_line(
    groups: Groups, stream: BatchCut, attention: BatchCut, pack: Pack | None, tensors: Sequence[Any]
) -> str:
    """Return the part of the start-up line about the exchanges around one layer.

    Args:
        groups: the grid.
        stream: how the run cuts batches.
        attention: how attention cuts sequences.
        pack: the documents of a packed batch, or None.
        tensors: q, k, v [s, b, heads, width] in the layout of the tokens.
    """
    q, k, v = tensors
    leaving, returning = (
        sum(route.leaving(groups.rank, groups.topology.per_node))
        for route in _routes(groups, stream, attention, pack, q.shape[0])
    )
    out = q.shape[1] * q.shape[2] * v.shape[3] * v.element_size()
    sent = leaving * sum(x[:1].numel() * x.element_size() for x in (q, k, v)) + returning * out
    return (
        f"; tokens are {stream.name} and attention is {attention.name}: each attention layer "
        f"exchanges rows of q, k, v and out, {byte_size(sent)} from a rank in forward and the same "
        "in backward"
    )


def _routes(
    groups: Groups, stream: BatchCut, attention: BatchCut, pack: Pack | None, local: int
) -> tuple[routes.Route, routes.Route]:
    """Return the routes of this rank's `local` rows to attention's layout and back."""
    total = local * groups.size
    stream_layout, attention_layout = (
        _layout(cut, pack, groups.size) for cut in (stream, attention)
    )
    return (
        routes.relayout(stream_layout, attention_layout, total, groups.rank),
        routes.relayout(attention_layout, stream_layout, total, groups.rank),
    )


def _layout(cut: BatchCut, pack: Pack | None, size: int) -> Layout:
    if pack is not None:
        return pack.layout(cut, size)
    return make_layout(cut.name, cp_size=size)

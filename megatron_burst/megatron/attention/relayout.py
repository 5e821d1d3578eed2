# SPDX-License-Identifier: Apache-2.0
"""Rows around softmax attention that has another layout than the stream of tokens.

Linear attention wants a contiguous stream, whose states then pass every rank once; causal attention
wants zigzag, which gives ranks equal work. Decides that only attention's own tensors travel: rows
of q, k and v go to the ranks that attention's layout gives them, and rows of its result come home.
Positions were applied to q and k before, as the stream has them.

Shape letters: s local rows, the same number under both layouts.
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

EXCHANGES_KEPT = 64  # more than packed micro-batches in flight


class Around(NamedTuple):
    """The exchange before attention and the one after it, for this rank of `groups`."""

    groups: Groups
    leaving: rows.DeviceRoute
    coming_home: rows.DeviceRoute
    identity: int

    def to_attention(self, tensors: tuple[torch.Tensor, ...], label: int) -> Any:
        """Rows of q, k, v [s, b, ...] of the stream, as attention's layout has them; collective."""
        return rows.exchange_rows(tensors, self.leaving, self.groups, self.identity, label)

    def to_stream(self, out: torch.Tensor, label: int) -> torch.Tensor:
        """Rows of attention's result, as the stream has them; collective."""
        return rows.exchange_rows((out,), self.coming_home, self.groups, self.identity, label)[0]


class Moves:
    """The exchanges of one grid, by what they depend on; the last `EXCHANGES_KEPT` of them."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._known = RecentCache(EXCHANGES_KEPT)

    def around(
        self,
        stream: BatchCut,
        attention: BatchCut,
        pack: Pack | None,
        tensors: Sequence[torch.Tensor],
    ) -> Around:
        """For q, k, v [s, ...] of a batch, which `pack` describes if it is packed.

        Makes the channel, a collective, when it is called first.
        """
        groups, device, local = self._groups, tensors[0].device, tensors[0].shape[0]
        groups.connect([rows.GRID], device)
        groups.expect(rows.longest(local, tensors))

        def make() -> Around:
            both = _routes(groups, stream, attention, pack, local)
            facts = repr((stream.name, attention.name, pack and pack.cut_key, local))
            leaving, coming_home = (rows.route_on_device(route, device) for route in both)
            return Around(groups, leaving, coming_home, crc32(facts.encode()))

        return self._known.of((stream, attention, pack and pack.cut_key, local, device), make)


def exchange_line(
    groups: Groups, stream: BatchCut, attention: BatchCut, pack: Pack | None, tensors: Sequence[Any]
) -> str:
    """What the exchanges around one layer cost this rank, for the start-up line.

    tensors: q, k, v [s, b, heads, width] of the stream.
    """
    q, k, v = tensors
    leaving, returning = (
        sum(route.leaving(groups.rank, groups.topology.per_node))
        for route in _routes(groups, stream, attention, pack, q.shape[0])
    )
    out = q.shape[1] * q.shape[2] * v.shape[3] * v.element_size()
    sent = leaving * sum(x[:1].numel() * x.element_size() for x in (q, k, v)) + returning * out
    return (
        f"; tokens lie {stream.name} and attention has {attention.name}: rows of q, k, v and out "
        f"travel around each layer of it, {byte_size(sent)} from a rank in forward and as much in "
        "backward"
    )


def _routes(
    groups: Groups, stream: BatchCut, attention: BatchCut, pack: Pack | None, local: int
) -> tuple[routes.Route, routes.Route]:
    """The way to attention's layout and the way back, of this rank with so many rows."""
    total = local * groups.size
    ours, theirs = (_layout(cut, pack, groups.size) for cut in (stream, attention))
    return (
        routes.relayout(ours, theirs, total, groups.rank),
        routes.relayout(theirs, ours, total, groups.rank),
    )


def _layout(cut: BatchCut, pack: Pack | None, size: int) -> Layout:
    if pack is not None:
        return pack.layout(cut, size)
    return make_layout(cut.name, cp_size=size)

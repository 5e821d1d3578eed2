# SPDX-License-Identifier: Apache-2.0
"""The plans that the layers of a model of Megatron Lite share, one per micro-batch.

Decides who makes a plan and who looks one up. The first layer of each kind leads: in a forward it
makes the plan, or compares with the other ranks the one that is there already. Layers behind it,
and all that backward runs again, look it up. So ranks whose batches differ get the same ValueError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ...comm.consensus import agree
from ...comm.groups import Groups
from ...comm.recent import RecentCache
from ...layout import make as make_layout
from ...linear_attention.plan import prepare_linear
from ...masks import Causal, Documents
from ...planning.prepare import prepare
from ...recompute.checkpoint import in_backward

PLANS_KEPT = 256  # more than packed micro-batches in flight x kinds of layers


class LiteKind(NamedTuple):
    """What is known of a layer when it is built, the same on all ranks: layers with the same have
    their plans in common.
    """

    sort: str
    sizes: tuple[int, ...]
    scale: float | None = None


@dataclass
class MicroBatches:
    """What the layers of a model share: the grid, and the plans of its micro-batches."""

    groups: Groups
    options: Mapping[str, Any]
    linear: str
    _kinds: set[LiteKind] = field(default_factory=set)
    _plans: RecentCache = field(default_factory=lambda: RecentCache(PLANS_KEPT))
    _bounds: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)

    def leads(self, kind: LiteKind) -> bool:
        """Register a layer; True for the first of its kind."""
        first = kind not in self._kinds
        self._kinds.add(kind)
        return first

    def documents(self, ends: Mapping[str, torch.Tensor | None]) -> tuple[int, ...] | None:
        """Cumulative lengths, of all ranks together, of the documents that tensors [documents + 1]
        tell; None without any. A tensor is read from its device once.
        """
        known = {name: self._read(x) for name, x in ends.items() if x is not None}
        if len(set(known.values())) > 1:
            raise ValueError(
                "packed_seq_params: documents must end where their padding ends, for queries and "
                f"keys alike, as Lite packs them; got {known}"
            )
        return next(iter(known.values()), None)

    def _read(self, ends: torch.Tensor) -> tuple[int, ...]:
        now = 0 if ends.is_inference() else ends._version
        known: Any = self._bounds.get(ends)
        if known is None or known[0] != now:
            known = self._bounds[ends] = now, tuple(ends.tolist())
        return known[1]

    def plan(
        self,
        kind: LiteKind,
        leads: bool,
        tensors: Mapping[str, torch.Tensor],
        ends: Mapping[str, torch.Tensor | None],
        make: Callable[[tuple[int, ...] | None], Any],
    ) -> Any:
        """The plan of these tensors [s, b, ...] for documents that end at `ends`; a collective if
        `leads`, outside of backward. make: makes one of the documents.
        """
        compares = leads and not in_backward()
        try:
            bounds = self.documents(ends)
            total = len(next(iter(tensors.values()))) * self.groups.size
            if bounds is not None and bounds[-1] != total:
                raise ValueError(
                    f"packed_seq_params: documents end at {bounds[-1]}, and the "
                    f"{self.groups.size} ranks hold {total} rows"
                )
        except ValueError as error:
            if compares:
                agree(error, self.groups.gather)
            raise
        key = kind, bounds, tuple((x.shape, x.dtype, x.device) for x in tensors.values())
        if not compares and key not in self._plans:
            shown = {name: (*x.shape, x.dtype) for name, x in tensors.items()}
            raise ValueError(
                f"attention got tensors that the first layer of its kind never saw, or not in its "
                f"last {PLANS_KEPT} calls: {shown}, documents {bounds}"
            )
        if compares and key in self._plans:
            self.groups.compare(self._plans[key].facts)
        return self._plans.of(key, partial(make, bounds))

    def cut(self, bounds: tuple[int, ...] | None) -> dict[str, Any]:
        """The layout by which Lite has cut a batch, as a keyword. Raises ValueError for documents
        that it would not have cut so, on every rank alike.
        """
        size = self.groups.size
        if bounds is None or size == 1:
            return {"layout": "zigzag" if size > 1 else "contiguous"}
        try:
            return {"layout": make_layout("zigzag", cp_size=size, cu_seqlens=bounds)}
        except ValueError as error:
            agree(error, self.groups.gather)
            raise

    def plan_attention(
        self, tensors: Mapping[str, torch.Tensor], scale: float | None, bounds: Any
    ) -> Any:
        """A plan of softmax attention; a collective."""
        mask = Causal() if bounds is None else Documents(bounds) & Causal()
        return prepare(
            *tensors.values(), groups=self.groups, needs_grad=(True, True, True), mask=mask,
            softmax_scale=scale, **self.cut(bounds), **self.options,
        )  # fmt: skip

    def plan_states(self, tensors: Mapping[str, torch.Tensor], bounds: Any) -> Any:
        """A plan of linear attention; a collective."""
        return prepare_linear(
            **tensors, groups=self.groups, cu_seqlens=bounds, algorithm=self.linear,
            **self.cut(bounds),
        )  # fmt: skip

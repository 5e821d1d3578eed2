# SPDX-License-Identifier: Apache-2.0
"""The plans that the layers of a model of Megatron Lite share, one per micro-batch.

Layers with the same class and sizes are of one kind and share plans. The first layer of a kind is
the leader of the kind. In each forward, the leader makes the plan, or checks that an existing plan
is the same on all ranks. Later layers, and all recomputed layers, look the plan up. If batches
differ between ranks, every rank raises the same `ValueError`.
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
    """Properties of a layer that determine its attention plans; equal on all ranks.

    Layers of equal kind share plans.

    Attributes:
        sort: Name of the layer's class in Lite.
        sizes: Numbers of heads, and widths of heads.
        scale: Softmax scale; None for the default.
    """

    sort: str
    sizes: tuple[int, ...]
    scale: float | None = None


@dataclass
class MicroBatches:
    """Process groups and plans (one per micro-batch) that all layers of a model share.

    Attributes:
        groups: The process groups.
        options: Keyword arguments of `mb.attention`.
        linear: The algorithm by which linear attention passes states between ranks.
    """

    groups: Groups
    options: Mapping[str, Any]
    linear: str
    _kinds: set[LiteKind] = field(default_factory=set)
    _plans: RecentCache = field(default_factory=lambda: RecentCache(PLANS_KEPT))
    _bounds: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)

    def leads(self, kind: LiteKind) -> bool:
        """Register a layer, and return True if it is the first of its kind."""
        first = kind not in self._kinds
        self._kinds.add(kind)
        return first

    def documents(self, ends: Mapping[str, torch.Tensor | None]) -> tuple[int, ...] | None:
        """Return the cumulative lengths of the packed documents; None if nothing is packed.

        Each tensor is copied from its device only once.

        Args:
            ends: tensors of cumulative lengths [documents + 1], or None, by argument name. All
                tensors must be equal.

        Raises:
            ValueError: The tensors differ.
        """
        lengths = {name: self._read(x) for name, x in ends.items() if x is not None}
        if len(set(lengths.values())) > 1:
            raise ValueError(
                "packed_seq_params: cumulative lengths of queries and keys, with and without "
                f"padding, must be equal, as in Lite's packs; got {lengths}"
            )
        return next(iter(lengths.values()), None)

    def _read(self, ends: torch.Tensor) -> tuple[int, ...]:
        version = 0 if ends.is_inference() else ends._version
        entry: Any = self._bounds.get(ends)
        if entry is None or entry[0] != version:
            entry = self._bounds[ends] = version, tuple(ends.tolist())
        return entry[1]

    def plan(
        self,
        kind: LiteKind,
        leads: bool,
        tensors: Mapping[str, torch.Tensor],
        ends: Mapping[str, torch.Tensor | None],
        make: Callable[[tuple[int, ...] | None], Any],
    ) -> Any:
        """Return the plan for these tensors.

        If `leads` is true, this is a collective call, except in backward.

        Args:
            kind: the kind of the layer.
            leads: True if the layer is the leader, the first layer of its kind.
            tensors: inputs [s, b, ...] by name; only shapes, dtypes and devices are read.
            ends: same as in `documents`.
            make: function that makes a plan from the cumulative lengths of the documents.

        Raises:
            ValueError: The documents do not fit the rows, ranks have different batches, or a layer
                gets other shapes than its leader.
        """
        compares = leads and not in_backward()
        try:
            bounds = self.documents(ends)
            total = len(next(iter(tensors.values()))) * self.groups.size
            if bounds is not None and bounds[-1] != total:
                raise ValueError(
                    f"packed_seq_params: documents end at {bounds[-1]}, but the "
                    f"{self.groups.size} ranks hold {total} rows; the two must be equal"
                )
        except ValueError as error:
            if compares:
                agree(error, self.groups.gather)
            raise
        key = kind, bounds, tuple((x.shape, x.dtype, x.device) for x in tensors.values())
        if not compares and key not in self._plans:
            shapes = {name: (*x.shape, x.dtype) for name, x in tensors.items()}
            raise ValueError(
                f"a layer got inputs {shapes} and documents {bounds}, which the first layer of the "
                f"same type did not get in its last {PLANS_KEPT} calls; inputs and documents must "
                "be the same for all layers of a forward"
            )
        if compares and key in self._plans:
            self.groups.compare(self._plans[key].facts)
        return self._plans.of(key, partial(make, bounds))

    def cut(self, bounds: tuple[int, ...] | None) -> dict[str, Any]:
        """Return the layout in which Lite has cut a batch, as keyword argument for `mb.prepare`.

        Args:
            bounds: cumulative lengths of the documents; None if nothing is packed.

        Raises:
            ValueError: Documents cannot be cut in zigzag order, which Lite uses; raised on every
                rank.
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
        """Make a plan of softmax attention. All ranks must call it; `bounds` is as in `cut`."""
        mask = Causal() if bounds is None else Documents(bounds) & Causal()
        return prepare(
            *tensors.values(), groups=self.groups, needs_grad=(True, True, True), mask=mask,
            softmax_scale=scale, **self.cut(bounds), **self.options,
        )  # fmt: skip

    def plan_states(self, tensors: Mapping[str, torch.Tensor], bounds: Any) -> Any:
        """Make a plan of linear attention. All ranks must call it; `bounds` is as in `cut`."""
        return prepare_linear(
            **tensors, groups=self.groups, cu_seqlens=bounds, algorithm=self.linear,
            **self.cut(bounds),
        )  # fmt: skip

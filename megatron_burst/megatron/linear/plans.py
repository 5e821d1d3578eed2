"""Plans that the layers of linear attention of a model share.

Made and looked up by the rule of `attention.plan_book`: of each kind of layer the lowest of this
rank makes the plan, in every forward, as a collective of the context-parallel group; the others
look it up. Decides what such layers have in common, and what a plan depends on.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch

import megatron_burst as mb
from megatron_burst.advisor import cluster_file
from megatron_burst.megatron.attention.plan_book import PLANS_KEPT, PlanBook
from megatron_burst.megatron.data.cut import Cut
from megatron_burst.megatron.data.packed import Pack
from megatron_burst.megatron.patching import registry


@dataclass(frozen=True)
class LinearKind:
    """What is known about such a layer when it is built; the same on all ranks.

    form: of `mb.linear_attention`; sizes: heads of keys and of values on this tensor-parallel rank,
    widths of keys and of values, width of the convolution.
    """

    burst: mb.BurstConfig
    form: str
    sizes: tuple[int, ...]
    cut: Cut
    scale: float | None = None  # of queries, None for that of `mb.linear_attention`

    def layout(self, pack: Pack | None, cp_size: int) -> mb.layout.Layout:
        """Which positions each rank holds, of a sequence or of a pack."""
        if pack is not None:
            return pack.layout(self.cut, cp_size)
        return mb.layout.make(self.cut.name, cp_size=cp_size)


@dataclass
class LinearBook:
    """The plans of layers that carry states, made over the grid of a `PlanBook`."""

    book: PlanBook
    startup: dict[LinearKind, str] = field(default_factory=dict)  # the line of each kind of layer
    _rates: mb.Rates | None = None  # of the run's cluster file, once it was read
    _plans: OrderedDict[tuple, mb.LinearPlan] = field(default_factory=OrderedDict)

    def plan(
        self, kind: LinearKind, leads: bool, inputs: dict[str, Any], pack: Pack | None
    ) -> mb.LinearPlan:
        """The plan for tensors like ``inputs`` (q, k, v, decay, beta as `mb.linear_attention` takes
        them); a collective if ``leads``, a look-up otherwise."""
        shapes = tuple((x.shape, x.dtype, x.device.type) for x in inputs.values())
        key = kind, pack, shapes
        if leads:
            self._plans[key] = self._prepare(kind, inputs, pack)
        elif key not in self._plans:
            raise ValueError(
                "this layer of linear attention got tensors that the lowest layer of its kind on "
                f"this rank never saw, or not in its last {PLANS_KEPT} calls: "
                f"{ {name: tuple(x.shape) for name, x in inputs.items()} }, documents "
                f"{pack and pack.bounds}; sequence length, micro-batch size and documents must be "
                "the same for all layers of a forward"
            )
        self._plans.move_to_end(key)
        if len(self._plans) > PLANS_KEPT:
            self._plans.popitem(last=False)
        return self._plans[key]

    def _prepare(
        self, kind: LinearKind, inputs: dict[str, Any], pack: Pack | None
    ) -> mb.LinearPlan:
        groups = self.book.groups
        cluster = kind.burst.cluster if kind.burst.linear == "auto" else None
        if cluster is not None and self._rates is None:
            self._rates = cluster_file.read(cluster).run_rates(groups.topology.per_node)
        plan = mb.prepare_linear(
            **inputs,
            form=kind.form,
            groups=groups,
            layout=kind.layout(pack, groups.size),
            cu_seqlens=None if pack is None else pack.bounds,
            algorithm=kind.burst.linear,
            scale=kind.scale,
            rates=None if cluster is None else self._rates,
        )
        if kind not in self.startup:
            self.startup[kind] = plan.describe() + (
                "" if cluster is None else f"; rates of {cluster}"
            )
            if torch.distributed.get_rank() == 0:
                logging.getLogger("megatron_burst").info(self.startup[kind])
        return plan


def linear_book(group: Any, key: tuple, book: PlanBook) -> LinearBook:
    """The plans over the grid of ``book``, which is that of a context-parallel group and a
    topology; kept until `uninstall`."""
    patches = registry.installed("burst")
    books = patches.notes.setdefault("linear_books", {}) if patches else {}
    if (group, key) not in books:
        books[group, key] = LinearBook(book)
    return books[group, key]

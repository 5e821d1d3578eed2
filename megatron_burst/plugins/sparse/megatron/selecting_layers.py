# SPDX-License-Identifier: Apache-2.0
"""Common code of layers with sparse attention: groups, plans and log lines.

Each layer has a `PlannedLayer`. A `SelectingKind` describes layers that share plans, and makes
plans of causal attention for the queries and keys of such a layer. In every forward, the first
layer of each kind makes or compares the plan, which is a collective (see `attention.plan_book`).
`mb.select`, `mb.sparse_attention` and `mb.indexer_loss` derive their plans from this plan without a
collective. This module also makes the start-up log line about the exchange of keys and index keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from megatron.core.transformer.enums import AttnMaskType

from ....masks import Causal
from ....megatron.attention.core_attention import check_call, check_pack
from ....megatron.attention.groups import book_of
from ....megatron.attention.plan_book import Kind, PlanBook, RowChunkSizes, Tensors
from ....megatron.checks.config import check_layer
from ....megatron.data.cut import BatchCut, cut_of_run, group_of
from ....megatron.data.other_cuts import check_cut, cuts_batches
from ....megatron.data.packed import Pack
from ....options import AttentionOptions
from ....planning.plan import Plan
from ....planning.prepare import AttentionOperation
from ....schedule.cost import Traffic
from ....units import byte_size
from ..options import SparseOptions
from .checks import sparse_algorithm


@dataclass(frozen=True)
class SelectingKind:
    """Properties of a sparse attention layer, fixed when it is built and equal on all ranks.

    Layers with equal properties share plans.

    Attributes:
        burst: Options of the run.
        cut: How the run splits batches over context-parallel ranks.
        name: Name of these layers in messages.
        index: Name of index keys in messages, and their number of elements per token.
        keys: Name of the keys and values of attention in messages, and their number of elements per
            token.
    """

    burst: SparseOptions
    cut: BatchCut
    name: str
    index: tuple[str, int]
    keys: tuple[str, int]

    def own_mask(self, pack: Pack | None, seq_len: int) -> None:
        """Return None: these layers have no mask of their own, only the causal mask."""

    def operation(
        self, book: PlanBook, tensors: Tensors, pack: Pack | None, rows: RowChunkSizes, own: None
    ) -> AttentionOperation:
        """Return the operation of causal attention for the tensors of a layer.

        Args:
            book: Cache of the plans of the layers of a context-parallel group.
            tensors: q [s, b, h, d], k [s, b, k, d] and v [s, b, k, w] by name.
            pack: Documents of a packed batch, or None.
            rows: Row chunks; not used.
            own: Mask of the layer; not used.
        """
        layout: Any = self.cut.name
        if pack is not None:
            layout = pack.layout(self.cut, book.groups.size)
        algorithm = sparse_algorithm(self.burst)
        return AttentionOperation(
            groups=book.groups,
            tensors=tuple(tensors.values()),
            shapes=None,
            options=AttentionOptions(
                layout=layout,
                mask=Causal() if pack is None else Causal() & pack.mask,
                algorithm=algorithm,
                side="kv",
                kernel="reference",  # not run: other plans are derived from this plan
                store=self.burst.store,
            ),
            needs_grad=(True, True, True),
            sink=None,
            max_logits=None,
            rates=book.rates(self.burst) if algorithm == "auto" else None,
        )

    def log(
        self, book: PlanBook, plan: Plan, tensors: Tensors, pack: Pack | None, own: None
    ) -> None:
        """Log the first plan of these layers; see `Kind.log`."""
        if self not in book.logged:
            book.logged.add(self)
            line = self.describe(plan)
            book.startup = book.startup or line
            book.log(line)

    def describe(self, plan: Plan) -> str:
        """Return the start-up log line about the exchange of keys in these layers."""
        topology = plan.groups.topology
        (_, _, _, width), (_, _, heads, values) = (plan.signature[n][0] for n in (1, 2))
        planned = heads * (width + values)
        index, keys = self.index[1] / planned, self.keys[1] / planned
        forward, backward = plan.traffic()
        return (
            f"{self.name}: {self.index[0]} and {self.keys[0]} by {self._algorithm(plan)} | "
            f"{topology.per_node} x {topology.size // topology.per_node} | "
            f"layout {plan.layout.describe()} | bytes per layer of rank {plan.groups.rank}: "
            f"{self.index[0]} {_bytes(forward, index)}, "
            f"{self.keys[0]} forward {_bytes(forward, keys)}, backward {_bytes(backward, keys)}"
        )

    def _algorithm(self, plan: Plan) -> str:
        if plan.choice is None:
            return plan.algorithm
        return f"the fastest for each ({plan.choice.rates.describe()})"


def _bytes(traffic: Traffic, share: float) -> str:
    intra, inter = (round(count * share) for count in (traffic.intra, traffic.inter))
    return f"{byte_size(intra)} intra + {byte_size(inter)} inter"


class SparseCall(TypedDict):
    """Plan and label that a layer passes to the sparse operations as keyword arguments."""

    plan: Plan
    label: int


class PlannedLayer:
    """Part of a layer that gets plans from the cache of the layer's context-parallel group.

    The first layer of a group creates the `mb.Groups` of the group, which is a collective call.

    Args:
        config: `TransformerConfig` after `configure`.
        pg_collection: Process groups of Megatron.
        layer_number: Layer number, from 1.
        name: Name of these layers in messages.
        kinds: Kinds of the plans that the layer needs.

    Raises:
        ValueError: A setting is not supported.
    """

    def __init__(
        self, config: Any, pg_collection: Any, layer_number: int, name: str, kinds: Sequence[Kind]
    ) -> None:
        burst: SparseOptions = config.burst
        check_layer(config, burst)
        self.config, self.name, self.kinds = config, name, kinds
        self.group = pg_collection.cp
        self.cut = cut_of_run(burst.layout)
        self._cuts = cuts_batches(config, pg_collection)
        self.label = max(1, layer_number or 1)
        self.book = book_of(config, pg_collection)
        self._leads = [self.book.join(kind, self.label) for kind in kinds]

    def plans(
        self,
        tensors: Tensors,
        packed_seq_params: Any,
        unsupported: dict[str, Any],
        mask_type: AttnMaskType | None = None,
    ) -> list[Plan]:
        """Return the plan of each kind for one forward of the layer.

        This is a collective call in the first layer of each kind. Only shapes, dtypes and device of
        the tensors are read.

        Args:
            tensors: Tensors of the call by name; "q" is the queries [s, b, h, d].
            packed_seq_params: Megatron's `PackedSeqParams`, or None.
            unsupported: Further arguments by name, which must be None.
            mask_type: Type of the mask; None means causal.

        Raises:
            ValueError: An argument is not supported; the first of these layers raises the error on
                all ranks.
        """
        with self.book.shared_errors(any(self._leads)):
            pack = self._pack(
                tensors["q"], packed_seq_params, unsupported, mask_type or AttnMaskType.causal
            )
        return [
            self.book.plan(kind, leads, tensors, pack)
            for kind, leads in zip(self.kinds, self._leads, strict=True)
        ]

    def _pack(
        self, q: Any, params: Any, unsupported: dict[str, Any], mask: AttnMaskType
    ) -> Pack | None:
        if mask not in (AttnMaskType.causal, AttnMaskType.padding_causal):
            raise ValueError(
                f"{self.name}: attention mask type {mask} is not supported; use a causal mask"
            )
        check_call(mask, unsupported, params, self.cut)
        if group_of(params, self.group) is not self.group:
            raise ValueError(
                "packed_seq_params sets a cp_group for this micro-batch (or local_cp_size 1), but "
                f"{self.name} layers need the context-parallel group of the model; omit "
                "cp_group and local_cp_size"
            )
        if params is None:
            return None
        size = self.book.groups.size
        pack = self.book.pack(len(q) * size, params)
        check_cut(params, pack, self.cut, size, self._cuts)
        check_pack(self.config, pack.layout(self.cut, size), size)
        return pack

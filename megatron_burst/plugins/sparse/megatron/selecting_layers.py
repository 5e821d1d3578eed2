# SPDX-License-Identifier: Apache-2.0
"""What layers of sparse attention over context-parallel ranks share: groups, plans and labels.

A `SelectingLayer` stands beside each layer. Its plan is of causal attention over the layer's own
queries and keys, made and looked up by the rule of `attention.plan_book`: of each kind of layer the
lowest of this rank makes it, in every forward, as a collective; `mb.select`, `mb.sparse_attention`
and `mb.indexer_loss` derive theirs from it without one. Decides which algorithm carries index keys
and keys, and what the start-up line says of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict

from megatron.core.transformer.enums import AttnMaskType

from ....masks import Causal
from ....megatron.attention.core_attention import check_call, check_pack
from ....megatron.attention.groups import book_of
from ....megatron.attention.plan_book import PlanBook, RowChunking, Tensors
from ....megatron.checks.config import check_config
from ....megatron.data.cut import BatchCut, cut_of_run, group_of
from ....megatron.data.other_cuts import check_cut, cuts_batches
from ....megatron.data.packed import Pack
from ....planning.plan import Plan
from ....planning.prepare import prepare
from ....schedule.cost import Traffic
from ....units import byte_size
from ..options import SparseOptions
from .checks import sparse_algorithm


@dataclass(frozen=True)
class SelectingKind:
    """What is known about such a layer when it is built; the same on all ranks.

    name: of these layers, for people. index: what an index key is called, and how many numbers a
    token has of it; keys: the same of the keys and values that attention gets.
    """

    burst: SparseOptions
    cut: BatchCut
    name: str
    index: tuple[str, int]
    keys: tuple[str, int]

    def own_mask(self, pack: Pack | None, seq_len: int) -> None:
        """None: such layers are causal."""

    def prepare(
        self, book: PlanBook, tensors: Tensors, pack: Pack | None, rows: RowChunking, own: None
    ) -> Plan:
        """The plan of causal attention over q [s, b, h, d], k [s, b, k, d] and v [s, b, k, w]."""
        layout: Any = self.cut.name
        if pack is not None:
            layout = pack.layout(self.cut, book.groups.size)
        algorithm = sparse_algorithm(self.burst)
        rates = book.rates(self.burst) if algorithm == "auto" else None
        plan: Any = prepare(
            *tensors.values(),
            groups=book.groups,
            needs_grad=(True, True, True),
            layout=layout,
            mask=Causal() if pack is None else Causal() & pack.mask,
            algorithm=algorithm,
            side="kv",
            kernel="reference",  # this plan runs nothing itself
            rates=rates,
            store=self.burst.store,
        )
        if self not in book.logged:
            book.logged.add(self)
            line = self.describe(plan)
            book.startup = book.startup or line
            book.log(line)
        return plan

    def describe(self, plan: Plan) -> str:
        """The start-up line of such layers, whose plan this is."""
        topology = plan.groups.topology
        (_, _, _, width), (_, _, heads, values) = (plan.signature[n][0] for n in (1, 2))
        planned = heads * (width + values)
        index, keys = self.index[1] / planned, self.keys[1] / planned
        forward, backward = plan.traffic()
        return (
            f"{self.name}: {self.index[0]} and {self.keys[0]} by {self._algorithm(plan)} | "
            f"{topology.per_node} x {topology.size // topology.per_node} | "
            f"layout {plan.layout.describe()} | bytes per layer and rank: "
            f"{self.index[0]} {_bytes(forward, index)}, "
            f"{self.keys[0]} forward {_bytes(forward, keys)}, backward {_bytes(backward, keys)}"
        )

    def _algorithm(self, plan: Plan) -> str:
        if plan.choice is None:
            return plan.algorithm
        return f"what auto takes for each ({plan.choice.rates.describe()})"


def _bytes(traffic: Traffic, share: float) -> str:
    intra, inter = (round(count * share) for count in (traffic.intra, traffic.inter))
    return f"{byte_size(intra)} intra + {byte_size(inter)} inter"


class SparseCall(TypedDict):
    """What `mb.select`, `mb.sparse_attention` and `mb.indexer_loss` take besides tensors."""

    plan: Plan
    label: int


class SelectingLayer:
    """One layer's share in the plans of its context-parallel group.

    config: a `TransformerConfig` after `configure`. pg_collection: Megatron's groups. name, index,
    keys: as `SelectingKind` has them. The first layer over a group makes its grid, a collective.
    Raises `ValueError` for settings that cannot be honoured.
    """

    def __init__(
        self,
        config: Any,
        pg_collection: Any,
        layer_number: int,
        name: str,
        index: tuple[str, int],
        keys: tuple[str, int],
    ) -> None:
        burst: SparseOptions = config.burst
        check_config(config, burst)
        self.group = pg_collection.cp
        self._cuts = cuts_batches(config, pg_collection)
        self.label = max(1, layer_number or 1)
        self.kind = SelectingKind(burst, cut_of_run(burst.layout), name, index, keys)
        self.config, self.book = config, book_of(config, pg_collection)
        self.leads = self.book.join(self.kind, self.label)

    def call(
        self,
        q: Any,
        k: Any,
        v: Any,
        packed_seq_params: Any,
        others: dict[str, Any],
        mask_type: AttnMaskType | None = None,
    ) -> SparseCall:
        """Plan and label of the calls of one forward; a collective if this layer leads.

        q [s, b, h, d], k [s, b, k, d], v [s, b, k, w]: only shapes, dtypes and device count.
        packed_seq_params: as Megatron gives them to the layer. others: its further arguments, which
        must be None. mask_type: causal, also where it is None. Raises `ValueError`, on all ranks if
        this layer leads.
        """
        with self.book.refusing(self.leads):
            pack = self._pack(q, packed_seq_params, others, mask_type or AttnMaskType.causal)
        plan = self.book.plan(self.kind, self.leads, {"q": q, "k": k, "v": v}, pack)
        return SparseCall(plan=plan, label=self.label)

    def _pack(self, q: Any, params: Any, others: dict[str, Any], mask: AttnMaskType) -> Pack | None:
        if mask not in (AttnMaskType.causal, AttnMaskType.padding_causal):
            raise ValueError(f"attention mask type {mask}: {self.kind.name} is causal")
        check_call(mask, others, params, self.kind.cut)
        if group_of(params, self.group) is not self.group:
            raise ValueError(
                f"packed_seq_params: cp_group, or local_cp_size 1: {self.kind.name} layers take "
                "the group that the model was built with"
            )
        if params is None:
            return None
        size = self.book.groups.size
        pack = self.book.pack(len(q) * size, params)
        check_cut(params, pack, self.kind.cut, size, self._cuts)
        check_pack(self.config, pack.layout(self.kind.cut, size), size)
        return pack

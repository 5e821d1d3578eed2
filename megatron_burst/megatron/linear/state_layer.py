"""What a layer of linear attention needs of the ranks that share its sequence.

Megatron's layer keeps its parameters whole and computes its own rows; this is what stands beside
it: the grid, the layout of the rows, the documents of a packed batch, and the plan of its calls.
"""

from __future__ import annotations

from typing import Any, TypedDict

from megatron.core.transformer.enums import AttnMaskType

import megatron_burst as mb
from megatron_burst.comm.consensus import agree
from megatron_burst.megatron.attention.books import book_of, topology_key
from megatron_burst.megatron.attention.call import check_call, check_pack
from megatron_burst.megatron.attention.micro_batch import group_of
from megatron_burst.megatron.checks.config import check_config
from megatron_burst.megatron.data.cut import cut_of_run
from megatron_burst.megatron.data.packed import Pack
from megatron_burst.megatron.linear.plans import LinearKind, linear_book


class StateCall(TypedDict):
    """What `mb.linear_attention` and `mb.short_convolution` take besides tensors."""

    plan: mb.LinearPlan
    label: int


class StateLayer:
    """One layer's share in the plans of its context-parallel group.

    config: a ``TransformerConfig`` after `configure`. pg_collection: Megatron's groups, with all
    context-parallel ranks. form, sizes, scale: as `LinearKind` has them. The first layer over a
    group makes its grid, a collective. Raises ``ValueError`` for settings that cannot be honoured.
    """

    def __init__(
        self,
        config: Any,
        pg_collection: Any,
        layer_number: int,
        form: str,
        sizes: tuple[int, ...],
        scale: float | None = None,
    ) -> None:
        burst: mb.BurstConfig = config.burst
        check_config(config, burst)
        self.config, self.group = config, pg_collection.cp
        self.label = max(1, layer_number or 1)
        self.kind = LinearKind(burst, form, sizes, cut_of_run(burst.layout), scale)
        self.book = book_of(config, pg_collection)
        self.plans = linear_book(pg_collection.cp, topology_key(config), self.book)
        self.leads = self.book.join(self.kind, self.label)

    def call(self, inputs: dict[str, Any], packed_seq_params: Any) -> StateCall:
        """Plan and label of the calls of one forward; a collective if this layer leads.

        inputs: q, k, v, decay and beta as `mb.linear_attention` takes them, of which only shapes,
        dtypes and device count. packed_seq_params: as Megatron gives them to the layer, or None.
        Raises ``ValueError``, on all ranks if this layer leads.
        """
        try:
            pack = self._pack(len(inputs["q"]), packed_seq_params)
        except ValueError as error:
            if self.leads:  # ranks whose call was right raise it too
                agree(error, self.book.groups.gather)
            raise
        return StateCall(
            plan=self.plans.plan(self.kind, self.leads, inputs, pack), label=self.label
        )

    def _pack(self, rows: int, params: Any) -> Pack | None:
        check_call(AttnMaskType.causal, {}, params, self.kind.cut)
        if group_of(params, self.group) is not self.group:
            raise ValueError(
                "packed_seq_params: cp_group, or local_cp_size 1: layers of linear attention take "
                "the group that the model was built with"
            )
        if params is None:
            return None
        size = self.book.groups.size
        pack = self.book.pack(rows * size, params)
        # Core attention, or the data path before it, has checked who cut the pack.
        check_pack(self.config, pack.layout(self.kind.cut, size), pack.total, size, uncut=False)
        return pack

# SPDX-License-Identifier: Apache-2.0
"""Megatron's sparse attention (DSA) over a ring of context-parallel ranks.

The ring replaces Megatron's all-gather. `BurstDSAttention` is a subclass of Megatron's module, with
the same indexer, parameters and names in checkpoints. Only forward differs: it sends index keys and
latents (compressed keys and values) around the ring. Losses are reduced, scaled and logged as in
Megatron. A layer may use the selection of an earlier layer (IndexShare).
"""

from __future__ import annotations

from contextvars import Context
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.transformer.enums import AttnMaskType

from ....layout.sharding import to_device
from ....megatron import homes
from ....megatron.data.cut import cut_of_run
from ....planning.plan import Plan
from ....recompute.checkpoint import current_store, in_backward
from ..attention import sparse_attention
from ..indexer import select
from ..loss import indexer_loss
from ..options import SparseOptions
from ..rules import Dsa
from ..selection import Selection, selected
from .checks import COEFFICIENT
from .selecting_layers import PlannedLayer, SelectingKind, SparseCall

# Exists in Megatron-Core 0.19 and newer.
dsa = homes.module("dsa")
_NOTE = "dsa selections"
CACHED_ROWS = 16  # tables of rows, one per micro-batch in flight


class BurstDSAttention(dsa.DSAttention):
    """Replacement for `DSAttention` in `AbsorbedMLASelfAttention` at context-parallel size > 1.

    After `install` and `configure`, Megatron's layers construct this class.

    Raises:
        ValueError: A setting is not supported; all ranks raise the same error.
    """

    def __init__(self, config: Any, submodules: Any, layer_number: int, **named: Any) -> None:
        super().__init__(config, submodules, layer_number, **named)
        latents = config.kv_lora_rank + config.qk_pos_emb_head_dim
        burst: SparseOptions = config.burst
        kind = SelectingKind(
            burst, cut_of_run(burst.layout), "DSA",
            ("index keys", config.dsa_indexer_head_dim), ("latents", latents),
        )  # fmt: skip
        self.layer = PlannedLayer(config, self.pg_collection, layer_number, "DSA", [kind])
        self.rule = Dsa(relu=config.dsa_indexer_scoring_relu)
        if self.indexer is not None and self._coefficient == 0:
            # Megatron's data parallelism waits for a gradient of each parameter that requires one.
            self.indexer.requires_grad_(False)
            self._log_frozen()

    def _log_frozen(self) -> None:
        line = (
            f"warning: {COEFFICIENT} is {self.config.dsa_indexer_loss_coeff}: DSA indexers are "
            "frozen and select with their present weights, which are random unless a checkpoint "
            f"was loaded; set {COEFFICIENT} (0.001, for example) to train them"
        )
        if line not in self.layer.book.logged:
            self.layer.book.logged.add(line)
            self.layer.book.log(line)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        x: torch.Tensor,
        qr: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        up_v_weight: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the output of attention [s, b, h * v_head_dim].

        Args:
            query: Queries [s, b, h, d], or [s, h, d] for a packed batch.
            key: Absorbed keys [s, b, 1, d], or [s, 1, d] for a packed batch.
            value: Must be None.
            attention_mask: None, or a mask that does not change causal attention; see `check_call`.
            x: Hidden states for the indexer [s, b, hidden]; with sequence parallelism only the rows
                of this tensor-parallel rank.
            qr: Compressed queries for the indexer [s, b, q_lora_rank], or [s, q_lora_rank] for a
                packed batch; the same rows as in `x`.
            position_ids: Ignored; positions follow from the layout.
            attn_mask_type: Type of the mask; None means causal.
            attention_bias: Must be None.
            packed_seq_params: Megatron's `PackedSeqParams`, or None.
            up_v_weight: Weight of the values [h, v_head_dim, kv_lora_rank].

        Raises:
            ValueError: An argument is not supported; all ranks raise the same error.
        """
        unsupported = {
            "value": value,
            "attention_mask": attention_mask,
            "attention_bias": attention_bias,
        }
        if query.dim() == 3:
            query, key = query.unsqueeze(1), key.unsqueeze(1)
        assert up_v_weight is not None  # AbsorbedMLASelfAttention always passes it
        width = self.config.kv_lora_rank
        tensors = {"q": query, "k": key, "v": key[..., :width]}
        (plan,) = self.layer.plans(tensors, packed_seq_params, unsupported, attn_mask_type)
        call = SparseCall(plan=plan, label=self.layer.label)
        if self.skip_topk:
            index, selection = None, self._source_selection(call)
        else:
            index, selection = self._selected(len(query), x, qr, packed_seq_params, call)
        out, lse = sparse_attention(
            query, key, None, selection, value_width=width, scale=self.softmax_scale,
            return_lse=True, **call,
        )  # fmt: skip
        out = torch.einsum("sbhc,hdc->sbhd", out, up_v_weight.to(out.dtype)).flatten(2)
        if index is None:
            return out
        tensor, over = self.pg_collection.tp, selection
        if not self.config.dsa_indexer_use_sparse_loss:
            over, lse = self._all_visible_keys(call["plan"]), None
        # The first run of Megatron's checkpoints has no gradients and skips this call, so the
        # attention store has no entry for it. Therefore the call runs without the store.
        loss_of: Any = partial(
            indexer_loss, *index, query.detach(), key.detach(), over, rule=self.rule, lse=lse,
            scale=self.softmax_scale, tp_group=tensor if tensor.size() > 1 else None, **call,
        )  # fmt: skip
        rows = Context().run(loss_of)
        loss = self._reduced(rows.squeeze(2).transpose(0, 1), packed_seq_params)
        return dsa.DSAIndexerLossAutoScaler.apply(out, loss)

    def _selected(
        self, rows: int, x: torch.Tensor, qr: torch.Tensor, packed: Any, call: SparseCall
    ) -> tuple[tuple[torch.Tensor, ...] | None, Selection]:
        """Return the indexer's tensors (queries, keys, weights) and the selected keys.

        The tensors are None if the indexer is not trained. `rows` is the number of query rows of
        this rank.
        """
        trains = self.training and torch.is_grad_enabled() and self._coefficient > 0
        with torch.enable_grad() if trains else torch.no_grad():
            # Detached, because only the indexer's own loss trains the indexer.
            q, k, weights = self.indexer.forward_before_topk(x.detach(), qr.detach(), packed)
        index = q, k.unsqueeze(2), weights
        top_k = min(self.index_topk, rows * self.layer.book.groups.size)
        selection = select(*index, rule=self.rule, top_k=top_k, **call)
        if self.index_share:
            self._selections[self.layer_number] = selection
        return index if trains else None, selection

    def _all_visible_keys(self, plan: Plan) -> Selection:
        """Return a selection of all visible keys of each row, for a loss over all keys.

        The number of entries per row is the length of the longest document. Megatron allocates a
        table of this size for each head.
        """
        cache = self.layer.book.groups.recent("dsa rows", CACHED_ROWS)
        rows = cache.find(plan.identity)
        if rows is None:
            rows = cache.keep(plan.identity, _rows(plan))
        first, last, count = rows
        ids = first[:, None] + torch.arange(count, dtype=torch.int32, device=first.device)
        ids = ids.masked_fill_(ids > last[:, None], -1)[:, None, None]
        batch = plan.signature[0][0][1]
        ids = ids.expand(-1, batch, -1, -1)
        return selected(ids, plan.layout, plan.mask, self.rule.block)

    @property
    def _coefficient(self) -> float:
        return self.config.dsa_indexer_loss_coeff or 0.0

    def _reduced(self, rows: torch.Tensor, packed: Any) -> torch.Tensor:
        """Reduce the losses of this rank's rows [b, s] to a scalar, and log it as in Megatron.

        The result is the sum over the rows if `calculate_per_token_loss` is set, otherwise the
        mean. Rows of padding are excluded if `packed`, the `PackedSeqParams`, describes them.
        """
        config, (batch, count) = self.config, rows.shape
        real = dsa.dsa_masking.extract_query_valid_rows_from_packed_seq_params(
            packed, b=batch, sq=count, device=rows.device
        )
        total = (rows if real is None else rows * real).sum() * self._coefficient
        per_token, group = config.calculate_per_token_loss, self.pg_collection.cp
        if not per_token:
            total = total / (rows.numel() if real is None else real.sum().clamp(min=1))
        dsa.DSAIndexerLossLoggingHelper.save_loss_to_tracker(
            loss=total,
            layer_number=self.layer_number,
            num_layers=config.num_layers,
            reduce_group=group if per_token else None,
            avg_group=None if per_token else group,
        )
        return total

    @property
    def _selections(self) -> dict[int, Selection]:
        """Layer number -> latest selection, for layers whose selection other layers reuse."""
        return self.layer.book.groups.cache.setdefault(_NOTE, {})

    def _source_selection(self, call: SparseCall) -> Selection:
        """Return the selection of the earlier layer `source_layer`, which this layer reuses.

        Before this layer is recomputed, the source layer may have run for another micro-batch.
        Therefore the attention store of the checkpoint around this call keeps the selection.
        """
        store, key = current_store(), (_NOTE, self.layer_number)
        if store is not None and store.filled:
            plan, (ids,) = call["plan"], store.get(key)
            return selected(ids, plan.layout, plan.mask, self.rule.block)
        if store is None and in_backward():
            raise ValueError(
                f"DSA layer {self.layer_number} shares the selection of layer {self.source_layer}, "
                "but a checkpoint function other than Megatron's recomputes it and did not keep "
                "the selection: disable full recompute, or let every layer select "
                "(--dsa-indexer-topk-freq 1)"
            )
        if self.source_layer not in self._selections:
            raise ValueError(
                f"DSA layer {self.layer_number} shares the selection of layer {self.source_layer}, "
                "which has not run before it in this pipeline stage: let every stage start with a "
                f"layer that selects (--dsa-indexer-topk-freq {self.index_topk_freq}, "
                f"--dsa-indexer-skip-topk-offset {self.index_skip_topk_offset})"
            )
        selection = self._selections[self.source_layer]
        if store is not None:
            store.put(key, (selection.ids,))
        return selection


def _rows(plan: Plan) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the visible positions of this rank's rows, and the length of the longest document.

    Returns:
        First and last visible position, int32 [s] each; a row without visible positions has last <
        first. Then the length of the longest document.
    """
    groups, total = plan.groups, plan.signature[0][0][0] * plan.groups.size
    positions = plan.layout.positions(groups.rank, total)
    bounds = np.unique(np.concatenate([[0, total], plan.mask.breaks]))
    first = bounds[np.searchsorted(bounds, positions, side="right") - 1]
    seen = plan.mask.visible(positions, positions)
    last = np.where(seen, positions, -1)
    first, last = (to_device(x.astype(np.int32), plan.device) for x in (first, last))
    return first, last, int(np.diff(bounds).max())

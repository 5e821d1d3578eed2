# SPDX-License-Identifier: Apache-2.0
"""Megatron's sparse attention (DSA) over a ring of context-parallel ranks, in place of its
all-gather.

The module is Megatron's own, with its indexer, parameters and names in checkpoints; here is only a
forward that lets index keys and latents travel. Losses are reduced, scaled and logged as Megatron
does. Decides where a layer that shares a selection (IndexShare) finds it.
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
from ....planning.plan import Plan
from ....recompute.checkpoint import current_store, in_backward
from ..attention import sparse_attention
from ..indexer import select
from ..loss import indexer_loss
from ..rules import Dsa
from ..selection import Selection, selected
from .checks import COEFFICIENT
from .selecting_layers import SelectingLayer, SparseCall

# From 0.19 on; before, it is another one.
dsa = homes.module("dsa")
_NOTE = "dsa selections"
ROWS_KEPT = 16  # tables of rows, of each micro-batch in flight


class BurstDSAttention(dsa.DSAttention):
    """Drop-in for `DSAttention` behind `AbsorbedMLASelfAttention` at context-parallel size > 1.

    Built by Megatron's layers after `install` and `configure`. Raises the same `ValueError` on all
    ranks for settings that it cannot honour.
    """

    def __init__(self, config: Any, submodules: Any, layer_number: int, **named: Any) -> None:
        super().__init__(config, submodules, layer_number, **named)
        latents = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.layer = SelectingLayer(
            config, self.pg_collection, layer_number, "DSA",
            ("index keys", config.dsa_indexer_head_dim), ("latents", latents),
        )  # fmt: skip
        self.rule = Dsa(relu=config.dsa_indexer_scoring_relu)
        if self.indexer is not None and self._coefficient == 0:
            # Megatron's data parallelism waits for a gradient of each parameter that requires one.
            self.indexer.requires_grad_(False)
            self._log_frozen()

    def _log_frozen(self) -> None:
        line = (
            f"warning: {COEFFICIENT} is {self.config.dsa_indexer_loss_coeff}: DSA indexers are "
            "frozen and select with the weights that they have, which are random unless a "
            f"checkpoint replaces them; set {COEFFICIENT} (0.001, for example) to train them"
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
        """Query [s, b, h, d], key [s, b, 1, d] absorbed, or packed [t, h, d], [t, 1, d] -> [s, b,
        h * v_head_dim].

        x [s, b, hidden], qr [s, b, q_lora_rank] or [t, q_lora_rank]: what the indexer sees, a
        tensor-parallel rank's rows of it with sequence parallelism. up_v_weight [h, v_head_dim,
        kv_lora_rank]. value and attention_bias must be None, attention_mask may be a tensor that
        adds nothing (`check_call`). position_ids are not read: positions follow from the layout.
        Raises `ValueError` on all ranks alike.
        """
        others = {
            "value": value,
            "attention_mask": attention_mask,
            "attention_bias": attention_bias,
        }
        if query.dim() == 3:
            query, key = query.unsqueeze(1), key.unsqueeze(1)
        assert up_v_weight is not None  # beside latents that are absorbed
        width = self.config.kv_lora_rank
        call = self.layer.call(
            query, key, key[..., :width], packed_seq_params, others, attn_mask_type
        )
        if self.skip_topk:
            index, selection = None, self._of_source(call)
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
            over, lse = self._everything(call["plan"]), None
        # Megatron's checkpoints run first without gradients, and this call is not made then: it
        # finds nothing of that run, so it runs outside the checkpoint's attention store.
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
        """(index queries, keys and weights, if the indexer is trained; the selection of `rows`)."""
        trains = self.training and torch.is_grad_enabled() and self._coefficient > 0
        with torch.enable_grad() if trains else torch.no_grad():
            # Detached: the indexer learns from its own loss alone.
            q, k, weights = self.indexer.forward_before_topk(x.detach(), qr.detach(), packed)
        index = q, k.unsqueeze(2), weights
        top_k = min(self.index_topk, rows * self.layer.book.groups.size)
        selection = select(*index, rule=self.rule, top_k=top_k, **call)
        if self.index_share:
            self._selections[self.layer_number] = selection
        return index if trains else None, selection

    def _everything(self, plan: Plan) -> Selection:
        """All keys that each row sees: what the loss is over unless it is sparse. As large as the
        rows times the longest document, of which Megatron has one table for each head.
        """
        cache = self.layer.book.groups.recent("dsa rows", ROWS_KEPT)
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
        """The loss of this rank's rows [b, s], as Megatron reduces and logs it: summed if its
        losses are per token, and their mean otherwise, of real tokens where it says which are.
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
        """The last selection of each layer, for those that share it."""
        return self.layer.book.groups.cache.setdefault(_NOTE, {})

    def _of_source(self, call: SparseCall) -> Selection:
        """The selection of the layer whose this one shares.

        Where this layer is recomputed, another micro-batch may have gone through that layer since:
        the checkpoint around this call keeps the selection of its own.
        """
        store, key = current_store(), (_NOTE, self.layer_number)
        if store is not None and store.filled:
            plan, (ids,) = call["plan"], store.get(key)
            return selected(ids, plan.layout, plan.mask, self.rule.block)
        if store is None and in_backward():
            raise ValueError(
                f"DSA layer {self.layer_number} is recomputed by a checkpoint that is not "
                f"Megatron's own, which keeps no selection of layer {self.source_layer} for it: "
                "leave full recompute out, or let every layer select (--dsa-indexer-topk-freq 1)"
            )
        if self.source_layer not in self._selections:
            raise ValueError(
                f"DSA layer {self.layer_number} shares the selection of layer {self.source_layer}, "
                "which has not run before it in this pipeline stage: let every stage begin with a "
                f"layer that selects (--dsa-indexer-topk-freq {self.index_topk_freq}, "
                f"--dsa-indexer-skip-topk-offset {self.index_skip_topk_offset})"
            )
        selection = self._selections[self.source_layer]
        if store is not None:
            store.put(key, (selection.ids,))
        return selection


def _rows(plan: Plan) -> tuple[torch.Tensor, torch.Tensor, int]:
    """int32 [s]: the first and the last position that each row sees (none if they are the wrong way
    round); and how many the longest document has.
    """
    groups, total = plan.groups, plan.signature[0][0][0] * plan.groups.size
    positions = plan.layout.positions(groups.rank, total)
    bounds = np.unique(np.concatenate([[0, total], plan.mask.breaks]))
    first = bounds[np.searchsorted(bounds, positions, side="right") - 1]
    seen = plan.mask.visible(positions, positions)
    last = np.where(seen, positions, -1)
    first, last = (to_device(x.astype(np.int32), plan.device) for x in (first, last))
    return first, last, int(np.diff(bounds).max())

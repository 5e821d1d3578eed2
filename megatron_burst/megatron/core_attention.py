"""BurstAttention as a Megatron-Core core attention: the module between projections.

Owns: the translation of Megatron's call into one of `mb.attention`, and what that call may ask
for. Must not know: how plans are shared (`plans`), where groups come from (`groups`).

Shape letters: s local sequence, b micro-batch, h query heads, g key/value heads of this
tensor-parallel rank, d key width, w value width.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule

import megatron_burst as mb
from megatron_burst.agreement import agree
from megatron_burst.megatron.checks import check_config
from megatron_burst.megatron.groups import context_groups
from megatron_burst.megatron.plans import Signature, plan_book

_CAUSAL = {AttnMaskType.causal: True, AttnMaskType.no_mask: False}


class BurstCoreAttention(MegatronModule):
    """Drop-in for ``DotProductAttention`` / ``TEDotProductAttention`` at context-parallel size > 1.

    Built by Megatron's attention layers once `install` and `configure` were called; the
    constructor takes their keywords. The first module over a context-parallel group makes the
    groups of its rings, a collective over that group.

    Raises ``ValueError`` for what it cannot honour, on all ranks alike.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__(config=config)
        self._burst: mb.BurstConfig = config.burst
        burst = self._burst
        check_config(config, burst)
        if attention_dropout:
            raise ValueError(f"attention dropout is {attention_dropout}; set --attention-dropout 0")
        if attention_type != "self":
            raise ValueError(f"attention_type is {attention_type!r}: only self-attention is split")
        for name, value in unknown.items():
            if value is not None:
                raise ValueError(f"core attention got {name}={value!r}, which it does not know")
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        sizes = config.hierarchical_context_parallel_sizes
        self.book = plan_book(
            pg_collection.cp,
            (tuple(sizes or ()), burst.intra_size),
            lambda: context_groups(pg_collection, sizes, burst.intra_size),
        )
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale
        self._kind = (
            config.num_attention_heads, config.num_query_groups, k_channels, v_channels,
        )  # fmt: skip
        self.leads = self.book.join(self._signature(attn_mask_type), max(1, layer_number))

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **unknown: Any,
    ) -> torch.Tensor:
        """query [s, b, h, d], key [s, b, g, d], value [s, b, g, w] of one dtype -> [s, b, h*w].

        s is this rank's share of the sequence, in the installed layout.
        """
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        asked = {"attention_mask": attention_mask, "attention_bias": attention_bias,
                 "packed_seq_params": packed_seq_params, **unknown}  # fmt: skip
        refusal = _refusal(mask_type, asked)
        if refusal is not None:
            self._fail(refusal)
        plan = self.book.plan(self._signature(mask_type), self.leads, query, key, value)
        return mb.attention(query, key, value, plan=plan).flatten(2)

    def _signature(self, mask_type: AttnMaskType) -> Signature:
        return Signature(
            burst=self._burst,
            causal=_CAUSAL.get(mask_type, True),
            softmax_scale=self.softmax_scale,
            kind=self._kind,
        )

    def _fail(self, error: ValueError) -> None:
        """Raise ``error``; if this layer leads, on the ranks that were called properly too."""
        if self.leads:
            agree([error], self.book.groups.gather)
        raise error


def _refusal(mask_type: AttnMaskType, asked: dict[str, Any]) -> ValueError | None:
    if mask_type not in _CAUSAL:
        return ValueError(
            f"attention mask type {mask_type} is not supported: only causal and no_mask are"
        )
    fixes = {
        "attention_mask": "it would be s x s: pass --no-create-attention-mask-in-dataloader",
        "attention_bias": "remove the relative position bias",
        "packed_seq_params": "packed sequences (THD) are not supported yet: pad them instead",
    }
    for name, value in asked.items():
        if value is not None:
            return ValueError(f"{name} is not supported; {fixes.get(name, 'leave it out')}")
    return None

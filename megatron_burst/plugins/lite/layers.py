# SPDX-License-Identifier: Apache-2.0
"""Replacements for Transformer Engine's attention and for gated delta nets in Megatron Lite.

Shape letters: t rows of all documents on this rank, s rows of a sequence on this rank, b batch, h
query heads, k key/value heads, d width of queries and keys, w width of values.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...attention import attention
from ...linear_attention.operation import linear_attention
from ...linear_attention.short_convolution import short_convolution
from ...planning.stand_ins import rows_like
from .micro_batches import LiteKind, MicroBatches


class LiteCoreAttention(torch.nn.Module):
    """Core attention of a layer; `forward` has the arguments of Lite's core attention.

    Args:
        shared: the process groups and plans that all layers of the model share.
        kind: the kind of the layer; layers of one kind share plans.
        leads: True if the layer is the leader, the first layer of its kind.
        number: layer number, for messages.
        before: the layer's original attribute values, by name. They are in a dict, so that torch
            does not register the replaced modules.
    """

    def __init__(
        self,
        shared: MicroBatches,
        kind: LiteKind,
        leads: bool,
        number: int,
        before: dict[str, Any],
    ):
        super().__init__()
        self.shared, self.kind, self.leads, self.number = shared, kind, leads, number
        self.before = before

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        core_attention_bias_type: str = "no_bias",
        attn_mask_type: str = "causal",
        qkv_format: str | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
    ) -> torch.Tensor:
        """Compute causal attention over packed documents or over batches.

        Args:
            query: [t, h, d] of packed documents, or [s, b, h, d].
            key: [t, k, d], or [s, b, k, d].
            value: [t, k, w], or [s, b, k, w].
            core_attention_bias_type: must be "no_bias".
            attn_mask_type: must end with "causal".
            qkv_format: ignored.
            cu_seqlens_q: cumulative lengths of the packed documents, over all ranks, int32
                [documents + 1].
            cu_seqlens_kv: None, or equal to `cu_seqlens_q`.
            cu_seqlens_q_padded: None, or equal to `cu_seqlens_q`.
            cu_seqlens_kv_padded: None, or equal to `cu_seqlens_q`.
            max_seqlen_q: ignored.
            max_seqlen_kv: ignored.

        Returns:
            [t, h * w] or [s, b, h * w].

        Raises:
            ValueError: There is a bias or another mask, cumulative lengths differ, or packed rows
                have no cumulative lengths.
        """
        if core_attention_bias_type != "no_bias" or not attn_mask_type.endswith("causal"):
            raise ValueError(
                "attention supports only Lite's causal attention without bias, got attn_mask_type "
                f"{attn_mask_type} and core_attention_bias_type {core_attention_bias_type}"
            )
        packed = query.dim() == 3
        if packed != (cu_seqlens_q is not None):
            raise ValueError(
                "cu_seqlens_q and packed rows [t, h, d] require each other; got query of shape "
                f"{[*query.shape]} and cu_seqlens_q {cu_seqlens_q}"
            )
        ends = {
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_kv": cu_seqlens_kv,
            "cu_seqlens_q_padded": cu_seqlens_q_padded,
            "cu_seqlens_kv_padded": cu_seqlens_kv_padded,
        }
        tensors = {"q": query, "k": key, "v": value}
        if packed:
            tensors = {name: x.unsqueeze(1) for name, x in tensors.items()}
        make = partial(self.shared.plan_attention, tensors, self.kind.scale)
        plan = self.shared.plan(self.kind, self.leads, tensors, ends, make)
        out = attention(*tensors.values(), plan=plan, label=self.number)
        assert isinstance(out, torch.Tensor)
        out = out.flatten(2)
        return out.squeeze(1) if packed else out


@dataclass
class DeltaNetForward:
    """Replacement for the `forward` of a gated delta net over context-parallel ranks.

    Each rank computes all heads of its own rows. The replacement uses the projections, gates and
    norms of the layer `net`, and this package's convolution and linear attention. Other attributes
    are the same as in `LiteCoreAttention`.
    """

    net: Any
    shared: MicroBatches
    kind: LiteKind
    leads: bool
    number: int

    def __call__(
        self, x: torch.Tensor, position_ids: Any = None, packed_seq_params: Any = None
    ) -> torch.Tensor:
        """Return the layer's output for hidden states x; both are [s, b, hidden size].

        With sequence parallelism, x and the output contain only this tensor-parallel rank's rows.
        """
        net = self.net
        mixed = net.in_proj(x)  # [s, b, q | k | v | gate | beta | alpha]
        ends = {} if packed_seq_params is None else _ends(packed_seq_params)
        like = self._stand_ins(mixed)
        make = partial(self.shared.plan_states, like)
        call = {"plan": self.shared.plan(self.kind, self.leads, like, ends, make)}
        call["label"] = self.number
        _, _, _, gate, beta, alpha = net._split_proj(mixed.transpose(0, 1), 1)
        batch, rows = gate.shape[:2]
        channels = mixed[..., : net.conv_dim_local]
        weight, bias = net.conv1d.weight.squeeze(1), net.conv1d.bias
        channels = short_convolution(channels, weight, bias, activation="silu", **call)
        q, k, v, gate, beta, alpha = net._prepare_qkv(
            channels.transpose(0, 1), gate, beta, alpha, batch, rows, 1
        )
        decay, beta = net._compute_g_and_beta(net.A_log, net.dt_bias, alpha, beta)
        inputs = {"q": q, "k": k, "v": v, "decay": decay, "beta": beta}
        out = linear_attention(**{name: t.transpose(0, 1) for name, t in inputs.items()}, **call)
        out = net._apply_gated_norm(out.transpose(0, 1), gate)
        out = out.reshape(batch, rows, net.v_dim_local)
        return net.o_proj(out.transpose(0, 1).contiguous())

    def _stand_ins(self, mixed: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return tensors without memory that have the shapes and dtypes of the layer's inputs.

        The inputs are those of linear attention: q, k, v, decay and beta.
        """
        net = self.net
        like = partial(rows_like, mixed, net.num_v_heads_local)
        decay = torch.promote_types(torch.float32, net.A_log.dtype)
        return {
            "q": like(net.dk), "k": like(net.dk), "v": like(net.dv), "decay": like(dtype=decay),
            "beta": like(),
        }  # fmt: skip


def _ends(params: Any) -> dict[str, Any]:
    names = ("cu_seqlens_q", "cu_seqlens_q_padded")
    return {name: getattr(params, name, None) for name in names}

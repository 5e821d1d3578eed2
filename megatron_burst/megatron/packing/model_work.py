"""The work of a Megatron model, as packing weighs it: from its configuration."""

from __future__ import annotations

from typing import Any

from megatron_burst.megatron.data.cut import causal_window
from megatron_burst.packing import Work


def work_of(config: Any) -> Work:
    """FLOPs of attention and of linear layers of a ``TransformerConfig``; the LM head aside."""
    heads, width = config.num_attention_heads, config.hidden_size
    of_query, of_value = _head_sizes(config)
    groups = getattr(config, "num_query_groups", None) or heads
    projections = width * (heads + groups) * (of_query + of_value)
    token = 2 * config.num_layers * (projections + width * _mlp_width(config))
    windows = [causal_window(config, number) for number in range(1, config.num_layers + 1)]
    return Work.of(token_flops=token, pair_flops=2 * heads * (of_query + of_value), windows=windows)


def _head_sizes(config: Any) -> tuple[int, int]:
    if getattr(config, "multi_latent_attention", False):
        return config.qk_head_dim + config.qk_pos_emb_head_dim, config.v_head_dim
    size = getattr(config, "kv_channels", None) or config.hidden_size // config.num_attention_heads
    return size, size


def _mlp_width(config: Any) -> int:
    """Columns of an MLP's matrices together; of all experts that a token goes to."""
    matrices = 3 if getattr(config, "gated_linear_unit", False) else 2
    hidden = config.ffn_hidden_size
    if getattr(config, "num_moe_experts", None):
        hidden = config.moe_router_topk * config.moe_ffn_hidden_size
        hidden += getattr(config, "moe_shared_expert_intermediate_size", None) or 0
    return matrices * hidden

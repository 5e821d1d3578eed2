# SPDX-License-Identifier: Apache-2.0
"""Bytes that ranks send in a hybrid model, by layout of the tokens; for `--burst-layout auto`.

- If tokens are contiguous, a state of linear attention visits each rank once; if tokens are zigzag,
  the state visits each rank twice.
- Softmax attention uses zigzag (or `--burst-attention-layout`). If the tokens have another layout,
  rows are exchanged before and after attention.

Bytes are computed from shapes and summed over the ranks, for one forward of one sequence. Backward,
tensor parallelism and the algorithm of the state scan change the bytes of both layouts by the same
factor.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..layout import make, routes
from .checks.problem import Problem, refuse
from .model_shape import ModelShape


class LayerCounts(NamedTuple):
    """Numbers of layers of a model: gated delta nets, Mamba mixers, and softmax attention."""

    delta_net: int
    mamba: int
    softmax: int


def traffic(
    config: Any, layers: LayerCounts, stream: str, attention: str, seq_length: int
) -> tuple[int, int]:
    """Return the bytes that all ranks together send in one forward of a sequence.

    Args:
        config: a `TransformerConfig`, or parsed arguments with the same names.
        layers: numbers of layers per kind.
        stream: the layout of the tokens.
        attention: the layout of softmax attention.
        seq_length: global sequence length in tokens.

    Returns:
        (bytes of states, bytes of rows that are exchanged around attention).
    """
    ranks = config.context_parallel_size
    # In zigzag a state passes the ranks in ascending order, then in descending order.
    hops = (ranks - 1) * (2 if stream == "zigzag" else 1)
    states = hops * (
        (layers.delta_net and layers.delta_net * _delta_net_state(config))
        + (layers.mamba and layers.mamba * _mamba_state(config))
    )
    if stream == attention or not layers.softmax:
        return states, 0
    stream_layout, attention_layout = (make(name, cp_size=ranks) for name in (stream, attention))
    moved = 0
    for rank in range(ranks):
        moved += sum(
            routes.relayout(stream_layout, attention_layout, seq_length, rank).leaving(rank, ranks)
        )
    return states, layers.softmax * moved * _attention_row(config)


def layers_of(config: Any) -> LayerCounts:
    """Return the numbers of layers of a model, including the layers of MTP heads.

    Raises:
        SettingsError: The configuration of a hybrid model does not contain its pattern.
    """
    shape = ModelShape.of(config)
    if shape.attention is None:
        refuse([Problem(
            "--burst-layout auto counts layers, and this configuration of a hybrid model does not "
            "state its pattern: name a layout",
            add=("--burst-layout zigzag",),
        )])  # fmt: skip
    return LayerCounts(
        shape.count("delta_net", "kda"), shape.count("mamba"), shape.count("softmax", "sparse")
    )


def _delta_net_state(config: Any) -> int:
    """Return the bytes that a delta net sends from rank to rank: fp32 states, convolution rows."""
    if ModelShape.of(config).count("kda"):
        heads, width, kernel = _sizes(
            config, "kimi_linear_num_heads", "kimi_linear_head_dim", "kimi_linear_conv_kernel_size"
        )
        return 4 * heads * width * width + _element(config) * (kernel - 1) * 3 * heads * width
    heads, width, kernel, key_heads, key_width = _sizes(
        config, "linear_num_value_heads", "linear_value_head_dim", "linear_conv_kernel_dim",
        "linear_num_key_heads", "linear_key_head_dim",
    )  # fmt: skip
    channels = 2 * key_heads * key_width + heads * width
    return 4 * heads * width * key_width + _element(config) * (kernel - 1) * channels


def _mamba_state(config: Any) -> int:
    """Return the bytes that a Mamba mixer (convolution of width 4) sends from rank to rank."""
    width, state, groups = _sizes(config, "mamba_head_dim", "mamba_state_dim", "mamba_num_groups")
    heads = getattr(config, "mamba_num_heads", None) or 2 * config.hidden_size // width
    channels = heads * width + 2 * groups * state
    return 4 * heads * width * state + _element(config) * 3 * channels


def _sizes(config: Any, *names: str) -> list[int]:
    """Return the values of these settings.

    Raises:
        SettingsError: The configuration lacks some of them.
    """
    missing = [name for name in names if getattr(config, name, None) is None]
    if missing:
        refuse([Problem(
            "--burst-layout auto counts bytes of states, and this configuration does not state "
            f"{', '.join(missing)}: set it, or name a layout",
            add=("--burst-layout zigzag",),
        )])  # fmt: skip
    return [getattr(config, name) for name in names]


def _attention_row(config: Any) -> int:
    """Return the bytes of q, k, v and out of one token."""
    heads = config.num_attention_heads
    if getattr(config, "multi_latent_attention", False):
        key = config.qk_head_dim + config.qk_pos_emb_head_dim
        return _element(config) * heads * (2 * key + 2 * config.v_head_dim)
    width = getattr(config, "kv_channels", None) or config.hidden_size // heads
    return _element(config) * 2 * width * (heads + (config.num_query_groups or heads))


def _element(config: Any) -> int:
    """Return the bytes per element of activations."""
    return 2 if getattr(config, "bf16", False) or getattr(config, "fp16", False) else 4

# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention (KDA) of Megatron-Bridge's Kimi K3: states are passed between ranks.

Bridge supports KDA on one context-parallel rank only. Here every rank keeps its rows and all heads:
the layer is built as on one rank, and our forward replaces Bridge's. Our forward uses the layer's
own projections, gates and norm. Ranks exchange only rows of the convolutions and states. Parameters
and checkpoints do not change. Layers of the same class with latent attention get our core
attention.

    S_t = (I - beta_t k_t k_t^T) D_t S_{t-1} + beta_t k_t v_t^T,
    D_t = diag(exp(bound sigmoid(exp(A) (gate_t + dt))))

Queries and keys have unit length (Kimi Linear, section 3; the bounded gate is `safe_gate` of
flash-linear-attention). Shape letters: s local rows, b batch, h heads of width d.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ...linear_attention.operation import linear_attention
from ...linear_attention.short_convolution import short_convolution
from ...planning.stand_ins import rows_like
from .. import patching
from ..attention.core_attention import BurstCoreAttention
from ..selection import burst_of, uses_burst
from .state_layers import MixerKind, StateLayer, construct, forward, wide


def enable(layer_class: type) -> None:
    """Patch Bridge's class `KimiK3Attention` to train over several context-parallel ranks.

    The patch requires Megatron-Core 0.19 or newer. It changes a layer only if the configuration
    selects BurstAttention. A second call has no effect.

    Args:
        layer_class: the class.

    Raises:
        RuntimeError: A method of the class lacks a required parameter.
    """
    name = f"layers, {layer_class.__name__}"
    if patching.installed(name) is None:
        with patching.patch_set(name) as patches:
            _patch(patches, layer_class, sys.modules[layer_class.__module__])


def _patch(patches: patching.PatchSet, layer_class: Any, home: Any) -> None:
    kind = MixerKind(layer_class, ("forward", "_forward_kda"), _states, _forward)

    def init(original: Callable, self: Any, *args: Any, **named: Any) -> None:
        arguments = patching.given_to(original, (self, *args), named)
        config = arguments["config"]
        if arguments["layer_number"] in config.kimi_kda_layers:
            return construct(kind, original, self, *args, **named)
        burst = burst_of(config)
        if not uses_burst(config, burst):
            return original(self, *args, **named)
        with patching.instead(home, "TEDotProductAttention", BurstCoreAttention):
            original(self, *args, **named)

    patches.wrap(layer_class, "__init__", ["config", "layer_number", "pg_collection"], init)
    names = ["hidden_states", "packed_seq_params"]
    patches.wrap(layer_class, "_forward_kda", names, partial(forward, kind))


def _states(layer: Any, config: Any, groups: Any) -> StateLayer:
    heads, width = layer.local_num_heads, layer.head_dim
    sizes = (heads, heads, width, width, config.kimi_linear_conv_kernel_size)
    return StateLayer(config, groups, layer.layer_idx + 1, "kda", sizes)


def _forward(layer: Any, states: StateLayer, hidden: torch.Tensor, packed: Any) -> torch.Tensor:
    """Return the output [s, b, width] for hidden [s, b, width].

    `hidden` contains the rows of all tensor-parallel ranks.
    """
    heads = (layer.local_num_heads, layer.head_dim)
    mixed = [_only(projection(hidden)) for projection in (layer.q_proj, layer.k_proj, layer.v_proj)]
    gates = _only(layer.f_b_proj(_only(layer.f_a_proj(hidden))))
    beta = _only(layer.b_proj(hidden))
    beta = beta.to(wide(beta)).sigmoid()
    call = states.prepare_call(_shapes(mixed[0], heads), packed)
    # One convolution over q, k and v, so that ranks exchange rows once.
    weights = [conv.weight for conv in (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d)]
    together = short_convolution(
        torch.cat(mixed, dim=-1), torch.cat(weights).squeeze(1), activation="silu", **call
    )
    q, k, v = (x.unflatten(-1, heads) for x in together.chunk(3, dim=-1))
    steps = gates.unflatten(-1, heads).to(wide(gates)) + layer.dt_bias.view(heads)
    rates = layer.A_log.to(steps.dtype).exp().unsqueeze(-1)
    out = linear_attention(
        _unit(q), _unit(k), v,
        decay=layer.gate_lower_bound * torch.sigmoid(rates * steps), beta=beta, **call,
    )  # fmt: skip
    gate = _only(layer.g_proj(hidden)).unflatten(-1, heads)
    normal = layer.o_norm(out.reshape(-1, heads[1]), gate.reshape(-1, heads[1]))
    return _only(layer.o_proj(normal.view(gate.shape).flatten(-2).to(hidden.dtype)))


def _only(projected: Any) -> torch.Tensor:
    """Return the output of a projection without its bias, which is None in `KimiK3Attention`."""
    out, _ = projected
    return out


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Return x scaled to length 1 along the last dimension, in the dtype of x."""
    long = x.to(wide(x))
    return (long * (long.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)


def _shapes(mixed: torch.Tensor, heads: tuple[int, int]) -> dict[str, Any]:
    """Return stand-ins for the inputs of `mb.linear_attention`: shapes and dtypes, no memory."""
    like = partial(rows_like, mixed)
    return {name: like(*heads) for name in ("q", "k", "v")} | {
        "decay": like(*heads, dtype=wide(mixed)),
        "beta": like(heads[0], dtype=wide(mixed)),
    }

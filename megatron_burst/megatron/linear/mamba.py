# SPDX-License-Identifier: Apache-2.0
"""Megatron's Mamba-2 mixer, with its state passed from rank to rank.

Megatron distributes the heads of a mixer by all-to-all and reorders the tokens from zigzag to
sequence order and back. Here every rank keeps its rows and all heads: the mixer is built as on one
context-parallel rank, and our forward replaces Megatron's. Our forward uses the mixer's own
projections and norm. Ranks exchange only rows of the convolution and states. Parameters and
checkpoints do not change.

A mixer is linear attention with scalar decay: queries are C, keys are B, values are x dt, and the
state decays by exp(A dt) per token.

Shape letters: s local rows, b batch, h heads of width p, g groups of states of width n.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ...linear_attention.operation import linear_attention
from ...linear_attention.short_convolution import short_convolution
from ...planning.stand_ins import rows_like
from .. import homes
from ..patching import PatchSet
from .state_layers import MixerKind, StateLayer, construct, forward, refuse_states, wide

MambaMixer = homes.module("mamba_mixer").MambaMixer
# Mixers of branch main with their own exchange of heads: module, class.
_UNSUPPORTED = (("gated_delta_product", "GatedDeltaProductMixer"),)
_ONLY = "only Mamba mixers, gated delta nets and Kimi K3's KDA can"


def patch(patches: PatchSet) -> None:
    """Wrap Megatron's Mamba mixers (0.19 and newer), so that they pass states between ranks."""
    names = ["config", "d_model", "layer_number", "pg_collection"]
    patches.wrap(MambaMixer, "__init__", names, partial(construct, KIND))
    names = ["hidden_states", "inference_context", "inference_params", "packed_seq_params"]
    patches.wrap(MambaMixer, "forward", names, partial(forward, KIND))
    for home, name in _UNSUPPORTED:
        module = homes.find(home)
        if module is not None:
            mixer = getattr(module, name)
            patches.wrap(mixer, "__init__", ["config"], partial(refuse_states, name, _ONLY))


def _states(mixer: Any, config: Any, groups: Any) -> StateLayer:
    sizes: Any = (
        mixer.ngroups_local_tp, mixer.nheads_local_tp, mixer.d_state, mixer.headdim, mixer.d_conv,
    )  # fmt: skip
    return StateLayer(config, groups, mixer.layer_number, "scalar_decay", sizes, scale=1.0)


def _forward(mixer: Any, states: StateLayer, hidden: torch.Tensor, packed: Any) -> Any:
    """Return (output, bias) for hidden [s, b, width].

    With sequence parallelism, `hidden` contains only the rows of this tensor-parallel rank.
    """
    projected, _ = mixer.in_proj(hidden)
    inner, groups, heads = mixer.d_inner_local_tp, mixer.ngroups_local_tp, mixer.nheads_local_tp
    state = groups * mixer.d_state
    gate, mixed, steps = projected.split((inner, inner + 2 * state, heads), dim=-1)
    call = states.prepare_call(_shapes(mixer, mixed), packed)
    mixed = short_convolution(
        mixed, mixer.conv1d_weight.squeeze(1), mixer.conv1d_bias, activation="silu", **call
    )
    x, keys, queries = mixed.split((inner, state, state), dim=-1)
    x = x.unflatten(-1, (heads, mixer.headdim))
    steps = F.softplus(steps.to(wide(steps)) + mixer.dt_bias)
    skip = mixer.D.to(steps.dtype).unflatten(0, (heads, -1))  # [h, 1], or [h, p] with D_has_hdim
    # Values get the dtype of keys, although Megatron keeps the step size in fp32: mixed dtypes are
    # refused, and flash-linear-attention supports only 16-bit values.
    out = linear_attention(
        queries.unflatten(-1, (groups, -1)),
        keys.unflatten(-1, (groups, -1)),
        (x * steps.unsqueeze(-1)).to(x.dtype),
        decay=-mixer.A_log.to(steps.dtype).exp() * steps,
        **call,
    )
    y = out + skip * x
    y = (y.flatten(2) * F.silu(gate)).to(projected.dtype)
    return mixer.out_proj(mixer.norm(y) if mixer.rmsnorm else y)


def _shapes(mixer: Any, mixed: torch.Tensor) -> dict[str, Any]:
    """Return stand-ins for the inputs of `mb.linear_attention`: shapes and dtypes, no memory."""
    like = partial(rows_like, mixed)
    keys = like(mixer.ngroups_local_tp, mixer.d_state)
    return {
        "q": keys,
        "k": keys,
        "v": like(mixer.nheads_local_tp, mixer.headdim),
        "decay": like(mixer.nheads_local_tp, dtype=wide(mixed)),
    }


KIND = MixerKind(MambaMixer, ("forward", "_ssm_training"), _states, _forward)

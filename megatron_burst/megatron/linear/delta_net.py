# SPDX-License-Identifier: Apache-2.0
"""Megatron's gated delta nets, with their states passed from rank to rank.

Megatron distributes the heads of such a layer by all-to-all and reorders the tokens from zigzag to
sequence order and back. Here every rank keeps its rows and all heads: the layer is built as on one
context-parallel rank, and our forward replaces Megatron's. Our forward uses the layer's own
projections, gates, norms and recomputation. Ranks exchange only rows of the convolution and states.
Parameters and checkpoints do not change.

`GatedDeltaNet2` (from 0.20) has one erase gate e and one write gate w per channel:

    S_t = (I - k_t (e_t * k_t)^T) D_t S_{t-1} + k_t (w_t * v_t)^T.

With a_t = sqrt(e_t) and the scaled state R_t = diag(a_t) S_t, this equals Kimi delta attention with
keys a_t * k_t, values w_t * v_t, beta 1, and decays that include the ratio of scales:

    R_t = (I - (a_t k_t)(a_t k_t)^T) (a_t / a_{t-1}) D_t R_{t-1} + (a_t k_t)(w_t * v_t)^T.

The output of R_t for query q_t / a_t equals the output of S_t for query q_t. At the start of a
document a_{t-1} is 1.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig

from ...linear_attention.operation import linear_attention
from ...linear_attention.short_convolution import short_convolution
from ...planning.stand_ins import rows_like
from .. import homes
from ..model_shape import DELTA_NETS
from ..patching import PatchSet, lacking, skips_megatrons_checks
from .state_layers import MixerKind, StateCall, StateLayer, construct, forward, refuse_states

home = homes.module("gated_delta_net")
GatedDeltaNet = home.GatedDeltaNet
_SILU = ("silu", "swish")
_CALLED_METHODS = {
    "_gated_norm_and_a2a": [
        "core_attn_out", "gate", "thd_cp_a2a_inv", "batch", "seq_len", "packed_seq_params"],
    "_prepare_input_for_gated_delta_rule": ["qkv", "gate"],
}  # fmt: skip
_SECOND: Any = getattr(home, "GatedDeltaNet2", None)


def patch(patches: PatchSet) -> None:
    """Wrap Megatron's delta nets (0.19 and newer), so that they pass states between ranks.

    If a method is missing, as in Megatron's branch for DeepSeek-V4, the layers are refused.
    """
    family = next(cls for cls in GatedDeltaNet.__mro__ if "__init__" in vars(cls))
    construct_names = ["config", "layer_number", "pg_collection"]
    reasons = (
        lacking(kind.layer_class, name, parameters)
        for kind in KINDS
        for name, parameters in _CALLED_METHODS.items()
    )
    why = next(filter(None, reasons), None)
    if why is not None:
        refusal = partial(refuse_states, GatedDeltaNet.__name__, why)
        patches.wrap(family, "__init__", construct_names, refusal)
        return
    patches.wrap(family, "__init__", construct_names, _construct)
    for mixer_kind in KINDS:
        names = ["hidden_states", "inference_context", "packed_seq_params", "inference_params"]
        patches.wrap(mixer_kind.layer_class, "forward", names, partial(forward, mixer_kind))


def _construct(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """Construct a delta net. Treat an unknown class as a subclass of `GatedDeltaNet`."""
    matching = (kind for kind in KINDS if isinstance(self, kind.layer_class))
    kind = next(matching, KIND)
    construct(kind, original, self, *args, **kwargs)


def _states(form: str, net: Any, config: Any, groups: Any) -> StateLayer:
    sizes: Any = (
        net.num_k_heads_local_tp, net.num_v_heads_local_tp, net.key_head_dim, net.value_head_dim,
        net.conv_kernel_dim,
    )  # fmt: skip
    return StateLayer(config, groups, net.layer_number, form, sizes)


def _forward(net: Any, states: StateLayer, hidden: torch.Tensor, packed: Any) -> Any:
    """Return (output, bias) for hidden [s, b, width].

    With sequence parallelism, `hidden` contains only the rows of this tensor-parallel rank.
    """
    projected, _ = net.in_proj(hidden)
    mixed, gate, *gates = torch.split(projected, net.feat_dim_split, dim=-1)
    call = states.prepare_call(_shapes(net, mixed, gates), packed)
    silu = net.activation in _SILU
    mixed = short_convolution(
        mixed,
        net.conv1d.weight.squeeze(1),
        net.conv1d.bias,
        activation="silu" if silu else None,
        **call,
    )
    if not silu:
        mixed = net.act_fn(mixed)
    inputs, gate = _prepared(net, mixed, gate, gates)
    if "beta" not in inputs:
        inputs = _one_gate(call=call, **inputs)
    with warnings.catch_warnings():
        if not mixed.is_cuda:  # the check of decay runs only on the CPU
            # The scale of rows may grow while the state does not.
            warnings.filterwarnings("ignore", message="decay has positive logarithms")
        out = linear_attention(**inputs, **call).transpose(0, 1)
    return _projected(net, out, gate)


def _shapes(net: Any, mixed: torch.Tensor, gates: list[torch.Tensor]) -> dict[str, Any]:
    """Return stand-ins for the inputs of `mb.linear_attention`: shapes and dtypes, no memory."""
    heads, like = net.num_v_heads_local_tp, partial(rows_like, mixed)
    erases = _of_channels(net)
    channels = (net.key_head_dim,) if erases else ()
    alpha, beta = gates[0 if erases else 1], gates[0]
    return {
        "q": like(heads, net.key_head_dim),
        "k": like(heads, net.key_head_dim),
        "v": like(heads, net.value_head_dim),
        "decay": like(heads, *channels, dtype=torch.promote_types(alpha.dtype, torch.float32)),
        "beta": like(heads, dtype=beta.dtype),
    }


def _of_channels(net: Any) -> bool:
    """Return whether a layer is a `GatedDeltaNet2`, which has one gate per channel."""
    return _SECOND is not None and isinstance(net, _SECOND)


def _prepared(
    net: Any, mixed: torch.Tensor, gate: torch.Tensor, gates: list[torch.Tensor]
) -> tuple[dict[str, Any], torch.Tensor]:
    """Compute the inputs of linear attention and the output gate with the layer's own methods.

    The layer's methods use tensors [b, s, ...]. From Megatron-Core 0.20 on, a single method makes
    all inputs.

    Returns:
        q, k, v, decay, and beta or erase and write, each [s, b, ...]; and the gate [b, s, h, w].
    """
    mixed, gate, *gates = (x.transpose(0, 1) for x in (mixed, gate, *gates))
    batch, rows = mixed.shape[:2]
    gate = gate.reshape(batch, rows, -1, net.value_head_dim)
    prepare = net._prepare_input_for_gated_delta_rule
    if hasattr(net, "_compute_g_and_beta"):
        q, k, v, gate, beta, alpha = prepare(mixed, gate, batch, rows, *gates)
        decay, beta = net._compute_g_and_beta(net.A_log, net.dt_bias, alpha, beta)
        inputs = {"q": q, "k": k, "v": v, "decay": decay, "beta": beta}
    else:
        prepared = prepare(mixed, gate, net.A_log, net.dt_bias, batch, rows, *gates)
        names = {"q": "q", "k": "k", "v": "v", "g": "decay", "beta": "beta", "b": "erase",
                 "w": "write"}  # fmt: skip
        gate = prepared["gate"]
        inputs = {names[name]: x for name, x in prepared.items() if name in names}
    return {name: x.transpose(0, 1) for name, x in inputs.items()}, gate


def _one_gate(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    erase: torch.Tensor,
    write: torch.Tensor,
    call: StateCall,
) -> dict[str, Any]:
    """Return q, k, v, decay and beta of the equivalent Kimi delta attention.

    All are [s, b, h, d] except v and write [s, b, h, w], and beta [s, b, h]. `erase` is clamped to
    eps^2 of decay's dtype, so that its logarithm is finite.
    """
    least = torch.finfo(decay.dtype).eps ** 2
    scale = erase.to(decay.dtype).clamp(min=least).log() / 2
    root = scale.exp()
    taps = scale.new_ones((scale.shape[2] * scale.shape[3], 2))
    taps[:, 0] = -1
    # Another rank may hold the previous row.
    steps = short_convolution(scale.flatten(2), taps, **call)
    return {
        "q": (q / root).to(q.dtype),
        "k": (k * root).to(k.dtype),
        "v": (v * write).to(v.dtype),
        "decay": decay + steps.view_as(scale),
        "beta": torch.ones_like(decay[..., 0], dtype=erase.dtype),
    }


def _projected(net: Any, out: torch.Tensor, gate: torch.Tensor) -> Any:
    """Apply the layer's gated norm and output projection to out [b, s, h, w]."""
    batch, rows = out.shape[:2]
    norm = partial(
        net._gated_norm_and_a2a,
        thd_cp_a2a_inv=None,
        batch=batch,
        seq_len=rows,
        packed_seq_params=None,
    )
    if not net.recompute_norm_out:
        return net.out_proj(norm(out, gate))
    net.norm_out_checkpoint = tensor_parallel.CheckpointWithoutOutput(fp8=net.config.fp8)
    result, bias = net.out_proj(net.norm_out_checkpoint.checkpoint(norm, out, gate))
    net.norm_out_checkpoint.discard_output_and_register_recompute(result)
    return result, bias


_HEADS = ("linear_num_key_heads", "linear_num_value_heads")


def patch_heads(patches: PatchSet) -> None:
    """Wrap `TransformerConfig.__post_init__`: skip the check of delta-net heads for BurstAttention.

    Configurations may then have fewer delta-net heads than ranks.
    """
    patches.wrap(TransformerConfig, "__post_init__", ["self"], _with_any_heads)


def _with_any_heads(original: Callable, self: Any) -> None:
    ranks, tensor = self.context_parallel_size, self.tensor_model_parallel_size
    heads = {name: getattr(self, name, None) for name in _HEADS}
    delta_net = getattr(self, "experimental_attention_variant", None) in DELTA_NETS
    if not delta_net or None in heads.values() or ranks <= 1 or not skips_megatrons_checks():
        return original(self)
    keys, values = counts = [int(n) for n in heads.values() if n is not None]
    if keys < 1 or values % keys or any(n % tensor for n in counts):
        return original(self)  # raises an error with the unchanged numbers
    # The product of heads and ranks passes Megatron's check, which is the only use of the heads in
    # `__post_init__`.
    try:
        for name, count in heads.items():
            setattr(self, name, count * ranks)
        original(self)
    finally:
        for name, count in heads.items():
            setattr(self, name, count)


def check_shared_heads(config: Any, tensor: int, ranks: int) -> None:
    """Raise an error unless context-parallel ranks can share the heads of a tensor-parallel rank.

    Args:
        config: a `TransformerConfig`.
        tensor: tensor-parallel size.
        ranks: context-parallel size.

    Raises:
        ValueError: The number of heads is not divisible by tensor x ranks.
    """
    for name in _HEADS:
        heads = getattr(config, name)
        if heads % (tensor * ranks):
            raise ValueError(
                f"{name} is {heads}: Megatron's own all-to-all of heads needs a multiple of "
                f"--tensor-model-parallel-size ({tensor}) x --context-parallel-size ({ranks}); "
                "use --context-parallel-algo burst, which passes states, with --burst-linear auto"
            )


# Methods that our forward replaces; `_setup_variant_attrs` selects the update rule.
_METHODS = ("forward", "_setup_variant_attrs", "_resolve_cu_seqlens")


def _kind(layer_class: Any, form: str) -> MixerKind:
    return MixerKind(layer_class, _METHODS, partial(_states, form), _forward, check_shared_heads)


KIND = _kind(GatedDeltaNet, "gated_delta_rule")
KINDS = (KIND, *([_kind(_SECOND, "kda")] if _SECOND is not None else []))

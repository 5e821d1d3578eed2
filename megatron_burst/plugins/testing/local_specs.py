# SPDX-License-Identifier: Apache-2.0
"""Layer specs of GPT models with gated delta nets or DSA (DeepSeek sparse attention).

Megatron builds such layers only from Transformer Engine's modules. This module builds them from
Megatron's local modules: it replaces the attention of local layers. Parameters have the same names
in checkpoints as in Transformer Engine's layers, so that checkpoints are interchangeable.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_linear_attention_pattern,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    get_mtp_layer_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from ...megatron import homes
from ...megatron.model_shape import DELTA_NETS, DSA
from ...megatron.patching import HYBRID_SINCE, core_version

_nets, _mixers = homes.module("gated_delta_net"), homes.module("mamba_mixer")
_mambas = homes.module("mamba_layer")


def local_block_spec(
    config: Any, vp_stage: int | None = None, pp_rank: int | None = None
) -> TransformerBlockSubmodules:
    """Return the layers of one pipeline stage of a GPT with gated delta nets or DSA.

    Args:
        config: A `TransformerConfig`. Its `experimental_attention_variant` is "dsa" for DSA in all
            layers, or "gated_delta_net" ("gdn" from 0.20 on) or "gdn2" for delta nets in the layers
            that `linear_attention_freq` selects.
        vp_stage: Virtual pipeline stage, as in Megatron's builders.
        pp_rank: Pipeline rank, as in Megatron's builders.

    Raises:
        ValueError: `experimental_attention_variant` has another value.
    """
    if config.experimental_attention_variant not in (*DELTA_NETS, DSA):
        raise ValueError(
            f"--experimental-attention-variant {config.experimental_attention_variant} without "
            f"Transformer Engine: local layers exist only for {', '.join(DELTA_NETS)} and {DSA}"
        )
    plain = copy.copy(config)  # a copy does not run __post_init__ again
    plain.experimental_attention_variant = None
    block = gpt_layer_specs.get_gpt_decoder_block_spec(
        plain,
        use_transformer_engine=False,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
        vp_stage=vp_stage,
        pp_rank=pp_rank,
    )
    layers = list(block.layer_specs or ())
    if config.experimental_attention_variant == DSA:
        layers = [with_dsa(layer) for layer in layers]
        return dataclasses.replace(block, layer_specs=layers)
    linear = get_linear_attention_pattern(config)
    for place, layer in enumerate(_layers(config, len(layers), vp_stage, pp_rank)):
        if linear[layer]:
            layers[place] = with_delta_net(layers[place], config)
    return dataclasses.replace(block, layer_specs=layers)


def with_delta_net(layer: ModuleSpec, config: Any) -> ModuleSpec:
    """Return a copy of a local transformer layer's spec, with a gated delta net as attention."""
    parts: Any = layer.submodules
    names = parts.sharded_state_dict_keys_map | {
        "input_layernorm.": "self_attention.in_proj.layer_norm_"
    }
    submodules = dataclasses.replace(
        parts, self_attention=delta_net(config), sharded_state_dict_keys_map=names
    )
    return dataclasses.replace(layer, submodules=submodules)


def delta_net(config: Any) -> ModuleSpec:
    """Return the spec of a gated delta net, built from local modules and without an input norm."""
    rms = config.normalization == "RMSNorm"
    norm: Any = LocalSpecProvider().layer_norm(rms_norm=rms, for_qk=False)
    second = config.experimental_attention_variant == "gdn2"
    return ModuleSpec(
        module=_nets.GatedDeltaNet2 if second else _nets.GatedDeltaNet,
        submodules=_nets.GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear,
            out_norm=norm,
            out_proj=RowParallelLinear,
        ),
    )


def with_dsa(layer: ModuleSpec) -> ModuleSpec:
    """Return a copy of a local transformer layer's spec, with DSA as attention."""
    parts: Any = layer.submodules
    submodules = dataclasses.replace(parts, input_layernorm=_NORM, self_attention=dsa())
    return dataclasses.replace(layer, submodules=submodules)


def dsa() -> ModuleSpec:
    """Return the spec of DSA from local modules; requires Megatron-Core 0.19 or newer.

    DSA is sparse attention to the latents of MLA: the latent of a token is its key and value for
    all heads.
    """
    home: Any = importlib.import_module(
        "megatron.core.models.gpt.experimental_attention_variant_module_specs"
    )
    plain: Any = SimpleNamespace(
        multi_latent_attention=True,
        qk_l2_norm=False,
        qk_layernorm=False,  # the layer itself adds norms from its configuration
        normalization="RMSNorm",
    )
    spec = home.get_dsa_module_spec_for_backend(plain, _WithLinear())
    parts: Any = spec.submodules
    parts.linear_q_down_proj = parts.linear_kv_down_proj = (
        _COLUMNS  # classes that the layer accepts
    )
    return spec


class _WithLinear(LocalSpecProvider):
    """Provider of Megatron's local modules, with `WholeLinear` as its linear layer."""

    def linear(self) -> type:
        return WholeLinear


class WholeLinear(torch.nn.Linear):
    """Linear layer with the whole weight on every tensor-parallel rank, without bias.

    It corresponds to a "duplicated" layer of Transformer Engine. `forward` returns (output, None),
    as Megatron's linear layers do.
    """

    def __init__(
        self, input_size: int, output_size: int, *, config: Any, init_method: Any, **unread: Any
    ) -> None:
        super().__init__(input_size, output_size, bias=False, dtype=config.params_dtype)
        if config.perform_initialization:
            init_method(self.weight)

    def forward(self, input: torch.Tensor) -> Any:
        return super().forward(input), None


def _layers(config: Any, count: int, vp_stage: int | None, pp_rank: int | None) -> Any:
    """Return the global layer indices (from 0) of a pipeline stage."""
    stages = config.pipeline_model_parallel_layout
    if stages is not None:
        return stages.get_layer_id_list(
            layer_type=LayerType.decoder, vp_stage=vp_stage, pp_rank=pp_rank
        )
    first = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=pp_rank)
    return range(first, first + count)


# The annotations of spec fields differ between versions of Megatron.
_ADD: Any = get_bias_dropout_add
_NORM: Any = WrappedTorchNorm
_COLUMNS: Any = ColumnParallelLinear
_ROWS: Any = RowParallelLinear


def local_hybrid_stack_spec() -> ModuleSpec:
    """Return the spec of a hybrid model with all kinds of layers and multi-token prediction.

    The configuration selects layer norm or RMS norm.
    """
    # Since 0.18; before, a stack is in another module and has other kinds of layers.
    home: Any = importlib.import_module("megatron.core.models.hybrid.hybrid_block")
    # Absent in Megatron's branch for DeepSeek-V4.
    has_latent = hasattr(home.HybridStackSubmodules, "mla_layer")
    # 8: any number except None; the configuration has the number of experts.
    experts: Any = get_moe_module_spec(use_te=False, num_experts=8, moe_grouped_gemm=False)
    return ModuleSpec(
        module=home.HybridStack,
        submodules=home.HybridStackSubmodules(
            mamba_layer=_mamba(),
            gdn_layer=_attention(
                ModuleSpec(
                    module=_nets.GatedDeltaNet,
                    submodules=_nets.GatedDeltaNetSubmodules(
                        in_proj=_COLUMNS,
                        out_norm=_NORM,
                        out_proj=_ROWS,
                    ),
                ),
                "in_proj",
            ),
            attention_layer=_attention(_gpt_attention(latent=False), "linear_qkv"),
            **({"mla_layer": _attention(_gpt_attention(latent=True))} if has_latent else {}),
            **({} if core_version() < HYBRID_SINCE else {"dsa_layer": _attention(dsa())}),
            mlp_layer=_mlp(),
            moe_layer=ModuleSpec(
                module=MoETransformerLayer,
                submodules=TransformerLayerSubmodules(
                    pre_mlp_layernorm=_NORM,
                    mlp=experts,
                    mlp_bda=_ADD,
                ),
            ),
            **(
                {}
                if core_version() < HYBRID_SINCE
                else {"mtp_block_spec": _multi_token_prediction()}
            ),
        ),
    )


def _multi_token_prediction() -> ModuleSpec:
    """Return the spec of multi-token prediction; the model's hybrid pattern sets its layers."""
    layer = get_mtp_layer_spec(cast("Any", None), use_transformer_engine=False)
    return ModuleSpec(
        module=MultiTokenPredictionBlock,
        submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[layer]),
    )


def _mamba() -> ModuleSpec:
    mixer = ModuleSpec(
        module=_mixers.MambaMixer,
        submodules=_mixers.MambaMixerSubmodules(in_proj=_COLUMNS, out_proj=_ROWS),
    )
    return ModuleSpec(
        module=_mambas.MambaLayer,
        submodules=_mambas.MambaLayerSubmodules(
            norm=_NORM,
            mixer=mixer,
            mamba_bda=_ADD,
            sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
        ),
    )


def _gpt_attention(latent: bool) -> Any:
    """Return the attention spec of Megatron's local GPT layers; `latent` selects MLA."""
    layer: Any = get_gpt_layer_local_spec(multi_latent_attention=latent)
    return layer.submodules.self_attention


def _attention(attention: Any, projection: str | None = None) -> ModuleSpec:
    """Return the spec of a hybrid model's layer with norm and attention, without MLP.

    Args:
        attention: Spec of the attention.
        projection: Name of the attention's first projection. Checkpoints then store the norm's
            parameters under the name of this projection. If None, the norm keeps its own name.
    """
    names = {"input_layernorm.": f"self_attention.{projection}.layer_norm_"} if projection else {}
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=_NORM,
            self_attention=attention,
            self_attn_bda=_ADD,
            sharded_state_dict_keys_map=names,
        ),
    )


def _mlp() -> ModuleSpec:
    mlp: Any = partial(
        getattr(MLP, "as_mlp_submodule"),  # noqa: B009  from 0.18 on
        submodules=MLPSubmodules(linear_fc1=_COLUMNS, linear_fc2=_ROWS),
    )
    return ModuleSpec(
        module=homes.module("mlp_layer").MLPLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=_NORM,
            mlp=mlp,
            mlp_bda=_ADD,
            sharded_state_dict_keys_map={"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"},
        ),
    )

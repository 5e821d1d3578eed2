"""Layer specs of GPT models with gated delta nets, out of Megatron's local modules.

Megatron builds such layers of Transformer Engine's modules only. Decides that a layer without it is
Megatron's own local layer with its attention replaced, and under which names its parameters are in
checkpoints: those of Transformer Engine's layers, so that these are interchangeable.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_linear_attention_pattern,
)
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_burst.megatron.checks.linear import DELTA_NETS


def local_block_spec(
    config: Any, vp_stage: int | None = None, pp_rank: int | None = None
) -> TransformerBlockSubmodules:
    """The layers that one pipeline stage has of a GPT with gated delta nets.

    config: a ``TransformerConfig`` whose ``experimental_attention_variant`` is "gated_delta_net"
    ("gdn" from 0.20 on) and whose ``linear_attention_freq`` says which layers have one. vp_stage,
    pp_rank: as Megatron's own builders take them. Raises ``ValueError`` for another variant.
    """
    if config.experimental_attention_variant not in DELTA_NETS:
        raise ValueError(
            f"--experimental-attention-variant {config.experimental_attention_variant} without "
            f"Transformer Engine: there are local layers for {DELTA_NETS[0]} only"
        )
    plain = copy.copy(config)  # without its __post_init__, which has run
    plain.experimental_attention_variant = None
    block = gpt_layer_specs.get_gpt_decoder_block_spec(
        plain,
        use_transformer_engine=False,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
        vp_stage=vp_stage,
        pp_rank=pp_rank,
    )
    linear, layers = get_linear_attention_pattern(config), list(block.layer_specs or ())
    for place, layer in enumerate(_layers(config, len(layers), vp_stage, pp_rank)):
        if linear[layer]:
            layers[place] = with_delta_net(layers[place], config)
    return dataclasses.replace(block, layer_specs=layers)


def with_delta_net(layer: ModuleSpec, config: Any) -> ModuleSpec:
    """A local transformer layer with a gated delta net as its attention."""
    parts: Any = layer.submodules
    names = parts.sharded_state_dict_keys_map | {
        "input_layernorm.": "self_attention.in_proj.layer_norm_"
    }
    submodules = dataclasses.replace(
        parts, self_attention=delta_net(config), sharded_state_dict_keys_map=names
    )
    return dataclasses.replace(layer, submodules=submodules)


def delta_net(config: Any) -> ModuleSpec:
    """A gated delta net of local modules, behind a norm of its own."""
    rms = config.normalization == "RMSNorm"
    norm: Any = LocalSpecProvider().layer_norm(rms_norm=rms, for_qk=False)
    return ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear,
            out_norm=norm,
            out_proj=RowParallelLinear,
        ),
    )


def _layers(config: Any, count: int, vp_stage: int | None, pp_rank: int | None) -> Any:
    """The numbers, from 0, of the layers that a stage has."""
    stages = config.pipeline_model_parallel_layout
    if stages is not None:
        return stages.get_layer_id_list(
            layer_type=LayerType.decoder, vp_stage=vp_stage, pp_rank=pp_rank
        )
    first = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=pp_rank)
    return range(first, first + count)

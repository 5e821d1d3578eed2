"""The layer spec of hybrid models out of Megatron's local modules.

Megatron's own (``hybrid_stack_spec``) can be imported without Transformer Engine, and names its
modules all the same. Decides that a layer of each kind is what Transformer Engine's is, with its
fused norm as a module of its own, and that checkpoints hold it under the fused name.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

# What fields of specs are annotated with differs between versions.
_ADD: Any = get_bias_dropout_add
_NORM: Any = WrappedTorchNorm
_COLUMNS: Any = ColumnParallelLinear
_ROWS: Any = RowParallelLinear


def local_hybrid_stack_spec() -> ModuleSpec:
    """All kinds of layers of a hybrid model but DSA ("D") and further heads, which need Transformer
    Engine. Their norms are layer norms or RMS norms as the configuration says."""
    # From 0.18 on; before, a stack has another home and other kinds of layers.
    home: Any = importlib.import_module("megatron.core.models.hybrid.hybrid_block")
    # 8: any number but None; the configuration has how many.
    experts: Any = get_moe_module_spec(use_te=False, num_experts=8, moe_grouped_gemm=False)
    return ModuleSpec(
        module=home.HybridStack,
        submodules=home.HybridStackSubmodules(
            mamba_layer=_mamba(),
            gdn_layer=_attention(
                ModuleSpec(
                    module=GatedDeltaNet,
                    submodules=GatedDeltaNetSubmodules(
                        in_proj=_COLUMNS,
                        out_norm=_NORM,
                        out_proj=_ROWS,
                    ),
                ),
                "in_proj",
            ),
            attention_layer=_attention(_of_gpt(latent=False), "linear_qkv"),
            mla_layer=_attention(_of_gpt(latent=True)),
            mlp_layer=_mlp(),
            moe_layer=ModuleSpec(
                module=MoETransformerLayer,
                submodules=TransformerLayerSubmodules(
                    pre_mlp_layernorm=_NORM,
                    mlp=experts,
                    mlp_bda=_ADD,
                ),
            ),
        ),
    )


def _mamba() -> ModuleSpec:
    mixer = ModuleSpec(
        module=MambaMixer,
        submodules=MambaMixerSubmodules(in_proj=_COLUMNS, out_proj=_ROWS),
    )
    return ModuleSpec(
        module=MambaLayer,
        submodules=MambaLayerSubmodules(
            norm=_NORM,
            mixer=mixer,
            mamba_bda=_ADD,
            sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
        ),
    )


def _of_gpt(latent: bool) -> Any:
    """The attention of Megatron's local GPT layers."""
    layer: Any = get_gpt_layer_local_spec(multi_latent_attention=latent)
    return layer.submodules.self_attention


def _attention(attention: Any, projection: str | None = None) -> ModuleSpec:
    """A layer of attention alone; projection: that into which Transformer Engine fuses the norm."""
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
        module=MLPLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=_NORM,
            mlp=mlp,
            mlp_bda=_ADD,
            sharded_state_dict_keys_map={"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"},
        ),
    )

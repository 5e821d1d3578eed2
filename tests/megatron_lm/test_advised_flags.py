"""Flags that `advise` prints, in Megatron-LM's own parser and checks; no model is built."""

import argparse
import importlib.util
import shlex
from types import SimpleNamespace

import pytest

pytest.importorskip(
    "megatron.training", reason="megatron.training is in wheels for Python 3.12 and on only"
)
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.training import arguments

import megatron_burst.megatron as burst
from megatron_burst.megatron.checks import command_line
from megatron_burst.megatron.patching import core_version
from megatron_burst.plugins.tools.advise.search import pasted
from megatron_burst.plugins.tools.advise.settings import Settings, stage_layers
from megatron_burst.plugins.tools.advise.shapes.models import NAMED

if core_version() < (0, 19):
    pytest.skip("its flags are those of Megatron-LM 0.19", allow_module_level=True)
# What `advise` leaves to the user; Megatron's fused rope asks for Transformer Engine.
OWN = "--lr 1e-4 --train-iters 10 --mock-data --tokenizer-type NullTokenizer --no-rope-fusion"
# Of a TransformerConfig, for one model of each kind, by hand.
SAYS = {
    "deepseek-v3": {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_head_dim": 128,
                    "qk_pos_emb_head_dim": 64, "v_head_dim": 128, "num_moe_experts": 256,
                    "moe_layer_freq": [0] * 3 + [1] * 58,
                    "moe_shared_expert_intermediate_size": 2048,
                    "moe_router_score_function": "sigmoid", "layernorm_epsilon": 1e-6,
                    "rope_type": "yarn", "rotary_scaling_factor": 40, "mscale": 1.0,
                    "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096},
    "deepseek-v4-flash": {"q_lora_rank": 1024, "v_head_dim": 512, "num_moe_experts": 256,
                          "moe_router_score_function": "sqrtsoftplus",
                          "moe_router_topk_scaling_factor": 1.5, "layernorm_epsilon": 1e-6},
    "deepseek-v2-lite": {"mscale": 0.707, "mscale_all_dim": 0.707, "beta_fast": 32,
                         "beta_slow": 1, "layernorm_epsilon": 1e-6},
    "qwen3-8b": {"layernorm_epsilon": 1e-6},
    "llama3-8b": {"layernorm_epsilon": 1e-5},
    "deepseek-v3.2": {"experimental_attention_variant": "dsa", "dsa_indexer_topk": 2048},
    "gpt-oss-20b": {"softmax_type": "learnable", "window_size": (127, 0),
                    "window_attn_skip_freq": 2, "gated_linear_unit": True,
                    "add_bias_linear": True, "expert_tensor_parallel_size": 1,
                    "yarn_rotary_scaling_factor": 32, "yarn_beta_fast": 32, "yarn_beta_slow": 1,
                    "yarn_original_max_position_embeddings": 4096, "yarn_mscale": 1.0,
                    "yarn_mscale_all_dim": 0.0, "yarn_correction_range_round_to_int": False},
    "gemma-3-4b": {"window_size": (1023, 0), "window_attn_skip_freq": 6, "kv_channels": 256},
    "qwen3-next-80b-a3b": {"experimental_attention_variant": "gated_delta_net",
                           "linear_attention_freq": 4, "linear_num_value_heads": 32,
                           "attention_output_gate": True, "moe_shared_expert_gate": True},
    "nemotron-h-8b": {"num_layers": 52, "mamba_num_heads": 128, "mamba_state_dim": 128,
                      "gated_linear_unit": False, "is_hybrid_model": True},
    "kimi-linear-48b-a3b": {"kv_lora_rank": 512, "moe_router_topk": 8},
}  # fmt: skip

# Of the arguments themselves.
ROPE = {
    "gpt-oss-20b": {"position_embedding_type": "yarn", "rotary_base": 150000},
    "llama3-8b": {"use_rope_scaling": False, "rotary_base": 500000},
    "llama3.1-8b": {"use_rope_scaling": True, "rope_scaling_factor": 8.0},
    "llama3.2-3b": {"use_rope_scaling": True, "rope_scaling_factor": 32.0},
    "qwen3-next-80b-a3b": {"rotary_base": 10**7, "rotary_percent": 0.25},
}


@pytest.fixture
def parser(monkeypatch):
    """Return Megatron's parser with our flags, as on an H100 with Transformer Engine."""
    burst.install()
    find = importlib.util.find_spec
    engine = SimpleNamespace(
        find_spec=lambda name: find("json" if name == "transformer_engine" else name)
    )
    monkeypatch.setattr(command_line, "importlib", SimpleNamespace(util=engine))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    found = SimpleNamespace(major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: found)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    yield arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    burst.uninstall()


@pytest.mark.filterwarnings("ignore")  # Megatron's, of its own arguments and defaults
@pytest.mark.parametrize("packs", ["", "balanced", "zigzag"])
def test_megatron_takes_the_flags_of_every_named_model(parser, packs, capsys):
    for name, model in NAMED.items():
        stages = 2 if model.layers % 4 == 0 else 1
        ep = 2 if model.experts else 1
        own = "ring" if 0 < model.windows < model.attentions else None
        run = Settings(seq=2**17, pp=stages, vpp=stages, tp=2, cp=4, ep=ep, micro_batches=4,
                       window_algorithm=own)  # fmt: skip
        words = shlex.split(" ".join(pasted.flags_of(model, run, packs)))
        args = parser.parse_args([*words, *OWN.split()])
        args.rank, args.local_rank, args.world_size = 0, 0, 8 * stages
        args = arguments.validate_args(args)
        config = arguments.core_transformer_config_from_args(args)
        assert isinstance(config, TransformerConfig), name
        assert args.context_parallel_algo == ("auto" if own else "burst")
        for field, value in SAYS.get(name, {}).items():
            assert getattr(config, field) == value, (name, field)
        for field, value in ROPE.get(name, {}).items():
            assert getattr(args, field) == value, (name, field)
        assert args.virtual_pipeline_model_parallel_size == (stages if stages > 1 else None), name


@pytest.mark.filterwarnings("ignore")
def test_megatron_cuts_unequal_stages_as_advise_counts_them(parser):
    model = NAMED["deepseek-v3"]
    run = Settings(seq=2**17, pp=4, first_layers=15, last_layers=14, tp=2, cp=4, micro_batches=4)
    words = shlex.split(" ".join(pasted.flags_of(model, run)))
    args = parser.parse_args([*words, *OWN.split()])
    args.rank, args.local_rank, args.world_size = 0, 0, 32
    config = arguments.core_transformer_config_from_args(arguments.validate_args(args))
    built = [get_num_layers_to_build(config, pp_rank=stage) for stage in range(4)]
    assert built == stage_layers(model, run) == [15, 16, 16, 14]

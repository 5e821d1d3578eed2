"""Settings that exclude MLP tiles, and the number of tiles that `auto` selects."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

import megatron_burst as mb
import megatron_burst.megatron as burst
from megatron_burst.plugins.longseq.checks import tile_problems
from megatron_burst.plugins.longseq.layer import tiles

CLEAN = {"hidden_dropout": 0.0}
REFUSED = {
    "hidden dropout is 0.1": {"hidden_dropout": 0.1},
    "--fp8-format: its scales": {"fp8": "hybrid"},
    "--fp4-format: its scales": {"fp4": "e2m1"},
    "--tp-comm-overlap: its buffers": {"tp_comm_overlap": True},
    "--delay-wgrad-compute": {"delay_wgrad_compute": True},
    "--overlap-dispatch-backward-with-experts-wgrad": {
        "overlap_dispatch_backward_with_experts_wgrad": True
    },
    "--overlap-moe-expert-parallel-comm": {"overlap_moe_expert_parallel_comm": True},
    "--moe-shared-expert-overlap": {"moe_shared_expert_overlap": True},
    "--fine-grained-activation-offloading": {"fine_grained_activation_offloading": True},
    "--cpu-offloading-num-layers": {"cpu_offloading": True},
    "--moe-pad-expert-input-to-capacity: the expert capacity would be computed per tile": {
        "moe_pad_expert_input_to_capacity": True
    },
    "--moe-input-jitter-eps": {"moe_input_jitter_eps": 0.1},
    "--moe-router-force-load-balancing": {"moe_router_force_load_balancing": True},
    "--moe-router-force-biased": {"moe_router_force_biased": 0.5},
    "--moe-paged-stash": {"moe_paged_stash": True},
    "--use-megatron-fsdp": {"use_megatron_fsdp": True},
    "--use-torch-fsdp2": {"use_torch_fsdp2": True},
    "replaces --mlp-chunks-for-training": {"mlp_chunks_for_training": 2},
    "modules of --recompute-modules mlp layernorm": {
        "recompute_granularity": "selective", "recompute_modules": ["core_attn", "layernorm", "mlp"]
    },
    "CUDA graphs replay without Python": {"cuda_graph_impl": "transformer_engine"},
    "the flex dispatcher": {"num_moe_experts": 4, "moe_token_dispatcher_type": "flex"},
    "with shared experts: under --sequence-parallel": {
        "num_moe_experts": 4, "moe_token_dispatcher_type": "allgather", "sequence_parallel": True,
        "moe_shared_expert_intermediate_size": 8,
    },
}  # fmt: skip


def told(settings, tiles=4):
    config = SimpleNamespace(**CLEAN | settings)
    return [str(each) for each in tile_problems(config, mb.BurstConfig(mlp_tiles=tiles))]


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused_is_named(words):
    (line,) = told(REFUSED[words])
    assert words in line
    assert "--burst-mlp-tiles 4" in line
    assert told(REFUSED[words], tiles=1) == []  # nothing of ours was asked for


def test_what_is_served():
    assert told({}) == []
    assert told({"recompute_granularity": "full", "recompute_modules": ["mlp"]}) == []
    assert told({"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}) == []
    assert told({"cuda_graph_impl": "none", "num_moe_experts": 4}, "auto") == []


@pytest.mark.parametrize("name", ["variable_seq_lengths", "hybrid_context_parallel"])
def test_automatic_numbers_need_equal_ranks(name):
    spread = {"num_moe_experts": 4, "expert_model_parallel_size": 2, name: True}
    (line,) = told(spread, "auto")
    assert line.endswith("set a number; add --burst-mlp-tiles 8")
    assert told(spread, 8) == []
    assert told(spread | {"expert_model_parallel_size": 1}, "auto") == []


def test_configure_refuses():
    burst.install()
    try:
        config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4)
        with pytest.raises(ValueError, match=r"hidden dropout is 0\.1.*add --hidden-dropout 0"):
            burst.configure(config, mb.BurstConfig(algorithm="megatron", mlp_tiles=2))
    finally:
        burst.uninstall()


@pytest.mark.parametrize(
    ("settings", "rows", "count"),
    [
        ({}, 2**20, 4 * 2 + 6),  # gelu: 4 of 2 hidden sizes, and 6
        ({"gated_linear_unit": True}, 2**20, 6 * 2 + 6),
        ({}, 5 * 512, 5),  # two samples each: 1,024 tokens
        ({}, 100, 1),
        ({"tensor_model_parallel_size": 2}, 2**20, 4 + 6),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, 2**20, 8 + 8),
    ],
)
def test_automatic_number_of_tiles(settings, rows, count):
    base = {"num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4}
    config = TransformerConfig(**base | settings)
    config.burst = mb.BurstConfig(mlp_tiles="auto")
    layer = SimpleNamespace(config=config, mlp=torch.nn.Linear(1, 1), is_moe_layer=False)
    assert tiles.tiles_of(layer, torch.empty(rows, 2, 32, device="meta")) == count


def test_numbers_stay_below_the_rows_and_layers_without_mlp_are_left_alone():
    from megatron.core.transformer.identity_op import IdentityOp

    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4)
    layer = SimpleNamespace(config=config, mlp=torch.nn.Linear(1, 1), is_moe_layer=False)
    hidden = torch.empty(3, 2, 32, device="meta")
    assert tiles.tiles_of(layer, hidden) == 1
    config.burst = mb.BurstConfig(mlp_tiles=8)
    assert tiles.tiles_of(layer, hidden) == 3
    layer.mlp = IdentityOp()
    assert tiles.tiles_of(layer, hidden) == 1


def test_the_first_tiles_are_moved():
    assert tiles.fates_of(4, 0.0) == ("recompute",) * 4
    assert tiles.fates_of(4, 0.3) == ("move", "move", "recompute", "recompute")
    assert tiles.fates_of(3, 1.0) == ("move",) * 3

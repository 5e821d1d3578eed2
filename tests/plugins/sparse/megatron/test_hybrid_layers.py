"""Layers of DeepSeek-V4's hybrid attention in Megatron: training is the same at all sizes."""

import pytest
import sparse_layers
from test_sparse_layers import CP2, CP4, FULL, PER_TOKEN, SELECTIVE, TP2, compare

LATENT = {
    "multi_latent_attention": True, "num_layers": 4, "q_lora_rank": 24, "v_head_dim": 16,
    "qk_pos_emb_head_dim": 8, "qk_head_dim": 8, "kv_lora_rank": 8,
    "original_max_position_embeddings": 16, "add_bias_linear": False,
}  # fmt: skip
LAYERS = {
    "rule": "csa", "csa_compress_ratios": [0, 4, 8, 4], "csa_window_size": 6, "top_k": 3,
    "index_heads": 3, "index_width": 12, "o_groups": 2, "o_lora_rank": 12,
}  # fmt: skip
CASES = {  # settings of Megatron, of BurstConfig
    "cp2": (CP2, {}),
    "cp4": (CP4, {"algorithm": "multicast"}),
    "cp4 contiguous": (CP4 | SELECTIVE, {"layout": "contiguous"}),
    "cp2 striped": (CP2 | FULL, {"layout": "striped"}),
    "tp2": (TP2, {}),
    "tp2 full": (TP2 | FULL, {"store": 1.0}),
    "auto": (CP4 | SELECTIVE, {"algorithm": "auto", "store": 1.0}),
}


@pytest.fixture(scope="module")
def alone(four):
    return four(sparse_layers.train, LATENT, LAYERS)[0]


@pytest.mark.parametrize("case", CASES)
def test_trains_alike_at_any_size(four, alone, case):
    changes, burst = CASES[case]
    assert all(index > 0 for _, index, _ in alone)
    for found in four(sparse_layers.train, LATENT | changes, LAYERS, burst):
        compare(found, alone, 1e-7 if "tp2" in case else 1e-12)

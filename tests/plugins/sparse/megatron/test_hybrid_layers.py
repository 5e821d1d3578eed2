"""Layers of DeepSeek-V4's hybrid attention in Megatron: training is the same at all sizes."""

import functools
import re
from types import SimpleNamespace

import hybrid_ranks
import pytest
import sparse_layers
import torch
from sparse_layers import HYBRID as LAYERS
from sparse_layers import LATENT
from test_sparse_layers import CP2, CP4, FULL, PER_TOKEN, PP2, SELECTIVE, TP2, compare

import megatron_burst as mb

CASES = {  # settings of Megatron, of BurstConfig
    "cp2": (CP2, {}),
    "cp4": (CP4, {"algorithm": "multicast"}),
    "cp4 contiguous": (CP4 | SELECTIVE, {"layout": "contiguous"}),
    "cp2 striped": (CP2 | FULL, {"layout": "striped"}),
    "tp2": (TP2, {}),
    "tp2 full": (TP2 | FULL, {"store": 1.0}),
    "pp2": (PP2 | PER_TOKEN, {}),
    "auto": (CP4 | SELECTIVE, {"algorithm": "auto", "store": 1.0}),
}
TWO_STEPS = ("cp2 striped", "pp2", "auto")


@pytest.fixture(scope="module")
def alone(four):
    return four(sparse_layers.train, LATENT, LAYERS)[0]


@pytest.mark.parametrize("case", CASES)
def test_trains_alike_at_any_size(four, alone, case):
    changes, burst = CASES[case]
    assert all(index > 0 for _, index, _ in alone)
    steps = 1 + (case in TWO_STEPS)
    for actual in four(sparse_layers.train, LATENT | changes, LAYERS, burst, False, steps):
        compare(actual, alone[:steps], 1e-7 if "tp2" in case else 1e-12)


PACK = (0, 24, 31, 31, 34, 80, 96)
PARITY = {  # settings of Megatron, of BurstConfig, documents
    "cp1": ({}, {}, None),
    "cp1 pack": ({}, {}, PACK),
    "cp2": (CP2, {}, None),
    "cp2 pack": (CP2 | PER_TOKEN, {"layout": "balanced"}, PACK),
    "cp4 contiguous": (CP4, {"layout": "contiguous"}, None),
    "cp4 contiguous pack": (CP4, {"layout": "contiguous"}, PACK),
    "cp4 zigzag pack": (CP4, {}, PACK),
    "cp4 padded pack": (CP4, {}, (0, 16, 24, 24, 64, 96)),
    "cp4 balanced pack": (CP4 | PER_TOKEN, {"layout": "balanced"}, PACK),
}


@pytest.fixture(scope="module")
def expected():
    return functools.cache(lambda bounds: hybrid_ranks.expected(bounds))


LISTED = ["cp1", "cp2 pack", "cp4 padded pack", "cp4 contiguous"]


@pytest.mark.parametrize(
    ("case", "function"),
    [(case, hybrid_ranks.against_transformers) for case in PARITY]
    + [(case, hybrid_ranks.with_lists) for case in LISTED],
)
def test_equals_transformers(four, expected, case, function):
    """Window, CSA, HCA, CSA: states and all gradients are those of transformers' layers."""
    right = expected(PARITY[case][2])
    for errors in four(function, *PARITY[case], right):
        assert len(errors) == 2 + 8 + 3 * 12
        for name, error in errors.items():
            assert error < 1e-5, name


@pytest.mark.parametrize("changes", [{}, CP4], ids=["cp1", "cp4"])
def test_padding_does_not_train_the_indexer(four, changes):
    runs = [four(hybrid_ranks.with_padding, changes, value) for value in (0.0, 2.0)]
    for (out, gradients), (other, others) in zip(*runs, strict=True):
        torch.testing.assert_close(out, other, rtol=0, atol=1e-6)
        assert all(gradient.abs().max() > 1e-6 for gradient in gradients.values())
        torch.testing.assert_close(gradients, others, rtol=0, atol=1e-6)


SIZES = {"csa_window_size": 6, "o_groups": 2, "o_lora_rank": 12}
VARIANTS = {  # arguments of the spec
    "dense": LAYERS | {"csa_dense_mode": True},
    "frozen": LAYERS | {"loss_coeff": 0},
    "hca": SIZES | {"rule": "hca"},  # 128 rows per key: there is no key
    "window": SIZES | {"rule": "window"},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_train_alike_at_any_size(four, name):
    expected = four(sparse_layers.train, LATENT, VARIANTS[name], {}, False, 1)[0]
    assert all(index == 0 for _, index, _ in expected)
    for found in four(sparse_layers.train, LATENT | CP4, VARIANTS[name], {}, False, 1):
        compare(found, expected, 1e-12)


def test_packed_documents_train_alike(four):
    expected = four(sparse_layers.train, LATENT, LAYERS, {}, True, 1)[0]
    for found in four(sparse_layers.train, LATENT | CP4 | FULL, LAYERS, {}, True, 1):
        compare(found, expected, 1e-12)


def test_names_in_checkpoints(four):
    """The names are those of Megatron's branch for DeepSeek-V4."""
    prefix = "decoder.layers.0.self_attention."
    for found in four(sparse_layers.names, LATENT | TP2, LAYERS, prefix):
        assert found == {
            "linear_q_down_proj.weight": (24, 32), "q_layernorm.weight": (24,),
            "linear_q_up_proj.weight": (64, 24), "linear_kv_proj.weight": (16, 32),
            "kv_layernorm.weight": (16,), "linear_o_group_proj": (24, 32),
            "linear_proj.weight": (32, 24), "core_attention.attn_sink": (4,),
        }  # fmt: skip
    compressor = {"linear_wkv.weight": (32, 32), "linear_wgate.weight": (32, 32), "ape": (4, 32),
                  "norm.weight": (16,)}  # fmt: skip
    indexer = {
        "linear_wq_b.weight": (36, 24), "linear_weights_proj.weight": (3, 32),
        "compressor.linear_wkv.weight": (24, 32), "compressor.linear_wgate.weight": (24, 32),
        "compressor.ape": (4, 24), "compressor.norm.weight": (12,),
    }  # fmt: skip
    wanted = {f"compressor.{n}": shape for n, shape in compressor.items()}
    wanted |= {f"indexer.{n}": shape for n, shape in indexer.items()}
    prefix = "decoder.layers.1.self_attention.core_attention."
    for found in four(sparse_layers.names, LATENT | TP2, LAYERS, prefix):
        del found["attn_sink"]
        assert found == wanted


WRONG = {  # words of the error -> arguments
    "csa_compress_ratios requires rule csa, got rule hca": {
        "rule": "hca", "csa_compress_ratios": [0],
    },
    "csa_compress_ratios must be a list with 0 or an integer >= 2": {
        "csa_compress_ratios": [0, 1],
    },
    "csa_compress_ratios must be a list": {"csa_compress_ratios": 4},
    "csa_window_size must be an integer >= 1, got 0": {"csa_window_size": 0},
    "dsa_indexer_topk must be an integer >= 1, got True": {"top_k": True},
    "csa_compress_rotary_base must be a number >= 1, got 'x'": {"csa_compress_rotary_base": "x"},
    "dsa_indexer_loss_coeff must be a number >= 0, got -1": {"loss_coeff": -1},
    "csa_dense_mode must be True or False, got 1": {"csa_dense_mode": 1},
    "block is not supported by rule csa": {"block": 4},
    "o_groups: supported only by rules csa, hca, window": {"rule": "dsa", "o_groups": 2},
}  # fmt: skip


@pytest.mark.parametrize("words", WRONG)
def test_wrong_arguments_are_refused(words):
    with pytest.raises(ValueError, match=re.escape(words)):
        mb.sparse_layer_spec(**{"rule": "csa"} | WRONG[words])


REFUSED = {  # words -> settings of Megatron, arguments of the spec, BurstConfig
    "need an MLATransformerConfig": ({"multi_latent_attention": False}, {}, {}),
    "need --q-lora-rank": ({"q_lora_rank": None}, {}, {}),
    "a ratio for each of the 4 layers, got 3": ({}, {"csa_compress_ratios": [0, 4, 8]}, {}),
    "csa_compress_ratios is required for rule csa": ({}, {"csa_compress_ratios": None}, {}),
    "o_groups 3 must divide --num-attention-heads 4": ({}, {"o_groups": 3}, {}),
    "index_width 4 must be at least": ({}, {"index_width": 4}, {}),
    "ranks cannot share": (CP4, {}, {"algorithm": "ulysses"}),
    "keep all attention outputs or none": (CP4 | FULL, {}, {"store": 0.5}),
    "with --softmax-type learnable": ({"softmax_type": "learnable"}, {}, {}),
    "cannot recompute mla_up_proj alone": (
        {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}, {}, {},
    ),
    "--burst-side query": (CP4, {}, {"side": "query"}),
    "need BurstAttention at any": ({}, {}, {"algorithm": "megatron"}),
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_served_is_refused_on_every_rank(four, words):
    changes, layers, burst = REFUSED[words]
    latent = LATENT if changes.get("multi_latent_attention", True) else {"num_layers": 4}
    for found in four(sparse_layers.message, latent | changes, LAYERS | layers, burst):
        assert words in (found or "")


@pytest.mark.parametrize("arguments", [{"loss_coeff": 0.5}, {"top_k": 2}, {"index_width": 16}])
def test_ranks_compare_the_settings_of_indexers(four, arguments):
    """With a loss on some ranks only, ranks would wait for each other."""
    for found in four(hybrid_ranks.with_other_settings, arguments):
        assert re.search(r"ranks disagree: rank 0 has indexer .*rank 3 has indexer", found)


def test_frequencies_are_those_of_transformers():
    """Yarn: the reference is transformers' function."""
    from transformers import PreTrainedConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from megatron_burst.plugins.sparse.megatron.hybrid_layers import Rotation

    scaled = {
        "rope_type": "yarn", "rope_theta": 160000.0, "factor": 16.0, "beta_fast": 32.0,
        "beta_slow": 1.0, "original_max_position_embeddings": 4096,
    }  # fmt: skip
    theirs = PreTrainedConfig(
        hidden_size=64, num_attention_heads=1, head_dim=64, rope_parameters=scaled,
        max_position_embeddings=65536,
    )  # fmt: skip
    wanted, _ = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
    ours = SimpleNamespace(
        qk_pos_emb_head_dim=64, beta_fast=32.0, beta_slow=1.0, rotary_scaling_factor=16.0,
        original_max_position_embeddings=4096, use_cpu_initialization=True,
    )  # fmt: skip
    torch.testing.assert_close(Rotation(ours, 160000.0, True).frequencies, wanted)

"""Shapes of models: parameters against published totals and by hand, and where they are read."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from megatron_burst.cli.main import main
from megatron_burst.plugins.tools import model_arguments
from megatron_burst.plugins.tools.advise.search import model_flags, pasted
from megatron_burst.plugins.tools.advise.shapes import models
from megatron_burst.plugins.tools.advise.shapes.layer_kinds import Latent, Mixer
from megatron_burst.plugins.tools.advise.shapes.megatron_model import model_from

# What the makers say, in 1e9: all, and active ones. "embedding": these count the embedding too.
# DeepSeek's 37 is rounded: 36.6 without the embedding.
PUBLISHED = {
    "llama3-8b": (8.03, None, False),
    "llama3.1-405b": (405.9, None, False),
    "llama3.2-3b": (3.21, None, False),
    "qwen3-8b": (8.19, None, False),
    "qwen3-30b-a3b": (30.5, 3.35, True),
    "qwen3-235b-a22b": (235.1, 22.2, True),
    "qwen3-next-80b-a3b": (79.7, None, False),
    "deepseek-v2-lite": (15.7, 2.45, False),
    "deepseek-v2": (236, 21.0, False),
    "deepseek-v3": (671, 36.7, False),
    "gpt-oss-20b": (20.91, 3.61, False),
    "gpt-oss-120b": (116.83, 5.13, False),
    "gemma-3-27b": (27.0, None, False),
    "nemotron-h-8b": (8.1, None, False),
    "kimi-linear-48b-a3b": (49.1, None, False),
    "minimax-text-01": (456, 47.2, False),
    "mixtral-8x22b": (140.6, None, False),
}


@pytest.mark.parametrize(("name", "total", "active", "embedding"),
                         [(name, *rest) for name, rest in PUBLISHED.items()])  # fmt: skip
def test_published_totals(name, total, active, embedding):
    model = models.named(name)
    assert model.parameters / 1e9 == pytest.approx(total, rel=0.01)
    if active:
        more = model.hidden * model.vocabulary * embedding
        assert (model.active_parameters + more) / 1e9 == pytest.approx(active, rel=0.01)


def test_latent_attention_by_hand():
    """DeepSeek-V3: q down and up, kv down with the turned part, keys and values up, out."""
    model = models.named("deepseek-v3")
    q = 7168 * 1536 + 1536 + 1536 * 128 * 192
    kv = 7168 * (512 + 64) + 512 + 512 * 128 * (128 + 128)
    attention = q + kv + 128 * 128 * 7168
    assert model.attention_parameters == attention + 2 * 7168
    dense, expert = 3 * 7168 * 18432, 3 * 7168 * 2048
    assert model.by_layer[2] == (attention + dense, 2 * 7168, 0)
    assert model.by_layer[3] == (attention + expert + 7168 * 256, 2 * 7168, 256 * expert)


def test_a_hybrid_by_hand():
    """Nemotron-H 8B: 24 Mamba-2, 4 attention and 24 MLP layers, a norm before each."""
    model = models.named("nemotron-h-8b")
    assert (model.mixers, model.attentions, model.mlps) == (24, 4, 24)
    inner, states = 128 * 64, 2 * 8 * 128
    mamba = 4096 * (2 * inner + states + 128) + inner * 4096
    mamba += 5 * (inner + states) + 3 * 128 + inner  # convolution and bias; A, D, dt; norm
    attention = 4096 * 128 * (32 + 2 * 8 + 32)
    ends = 2 * 131072 * 4096 + 4096
    found = 24 * mamba + 4 * attention + 24 * 2 * 4096 * 21504 + 52 * 4096 + ends
    assert model.parameters == found
    assert not model.uncounted


def config(**more):
    return {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 256,
            "num_attention_heads": 8, "intermediate_size": 512,
            "vocab_size": 1000} | more  # fmt: skip


def test_a_configuration_of_a_model_that_is_known(tmp_path):
    fields = {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096,
              "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
              "vocab_size": 128256}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    read = replace(models.named(str(tmp_path)), name="llama3-8b", family=None)
    assert read == replace(models.named("llama3-8b"), family=None)


def test_config_of_latent_attention_and_dense_first_layers():
    read = models.from_config(config(
        model_type="deepseek_v3", kv_lora_rank=32, q_lora_rank=None, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=16,
        n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, n_shared_experts=2,
        first_k_dense_replace=1, num_nextn_predict_layers=1,
    ))  # fmt: skip
    assert read.latent == Latent(32, 8, 0)
    assert (read.head_dim, read.value_dim, read.kv_heads) == (24, 16, 8)
    assert (read.moe_layers, read.dense_ffn, read.ffn, read.shared) == (3, 512, 64, 128)
    assert read.uncounted == ("multi-token prediction",)


@pytest.mark.parametrize(
    ("more", "pattern", "window"),
    [({"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 2,
       "model_type": "qwen2", "use_sliding_window": True}, "WFWF", 128),
     ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3,
       "model_type": "qwen2"}, "FFFW", 64),
     ({"sliding_window": 64, "use_sliding_window": False, "model_type": "qwen2"}, "FFFF", 0),
     ({"sliding_window": 64, "sliding_window_pattern": 2, "model_type": "cohere2"}, "WFWF", 64)],
)  # fmt: skip
def test_config_of_windows(more, pattern, window):
    read = models.from_config(config(num_key_value_heads=8, **more))
    assert (read.letters, read.window) == (pattern, window)


def test_config_of_hybrids():
    mamba = {"mamba_num_heads": 8, "mamba_head_dim": 64, "n_groups": 2, "ssm_state_size": 16,
             "conv_kernel": 4, "mlp_hidden_act": "relu2", "model_type": "nemotron_h"}  # fmt: skip
    read = models.from_config(config(hybrid_override_pattern="M-*-", **mamba))
    assert read.letters == "M-*-"
    assert read.mixer == Mixer("Mamba-2", 2 * 512 + 64 + 8, 512, 8, 5 * (512 + 64) + 24 + 512,
                               "scalar_decay", 2, 16, 64, 4)  # fmt: skip
    assert not read.gated
    linear = {"linear_num_value_heads": 8, "linear_num_key_heads": 4, "linear_key_head_dim": 16,
              "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4,
              "model_type": "qwen3_next"}  # fmt: skip
    read = models.from_config(config(full_attention_interval=4, **linear))
    assert read.letters == "LLLF"
    assert read.output_gate
    assert read.mixer.into == 2 * 64 + 2 * 256 + 16
    assert read.mixer.convolved == 2 * 64 + 256
    lightning = {"model_type": "minimax", "head_dim": 16, "num_local_experts": 4,
                 "layer_types": ["linear_attention"] * 3 + ["full_attention"]}  # fmt: skip
    read = models.from_config(config(**lightning))
    assert (read.letters, read.mixer.into, read.mixer.taps) == ("LLLF", 4 * 8 * 16, 0)


@pytest.mark.parametrize(
    ("more", "words"),
    [({"layer_types": ["full_attention"] * 3 + ["lightning"]}, "`layer_types` entries must be in"),
     ({"hybrid_override_pattern": "M-*-"}, "unknown fields 'hybrid_override_pattern'"),
     ({"kv_lora_rank": 32}, "qk_rope_head_dim"),
     ({"ssm_state_size": 16}, "unknown fields 'ssm_state_size' .16."),
     ({"sliding_window": 64}, "unknown fields 'sliding_window' .64."),
     ({"attention_chunk_size": 64}, "unknown fields 'attention_chunk_size' .64."),
     ({"attn_type_list": [0, 1]}, "'attn_type_list' must have 4 entries .*, got 2"),
     ({"attn_type_list": [0, 1, 1, 1]}, "cannot count layers .*from model_type 'llama'"),
     ({"block_configs": [{"no_op": True}] * 4}, "unknown fields 'block_configs'"),
     ({"num_attention_heads_per_layer": [8, 4, 4, 4]}, "'num_attention_heads_per_layer'"),
     ({"n_expert_shards": 2}, "unknown fields 'n_expert_shards' .2., which may"),
     ({"linear_attn_config": {"full_attn_layers": [4]}}, "'linear_attn_config'"),
     ({"num_attention_heads": None} | {"num_key_value_heads": 3}, "not a multiple")],
)  # fmt: skip
def test_configurations_that_are_refused(more, words):
    more = {name: value for name, value in more.items() if value is not None}
    with pytest.raises(ValueError, match=words):
        models.from_config(config(**more))


LLAMA31 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8192, "rope_type": "llama3"}  # fmt: skip
YARN = {"factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn"}
LATENT = {"model_type": "deepseek_v3", "kv_lora_rank": 32, "q_lora_rank": None,
          "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
          "first_k_dense_replace": 4}  # fmt: skip
EPSILON = "--norm-epsilon 1e-06"
BASE = f"{EPSILON} --rotary-base 10000"  # defaults of Llama and DeepSeek-V3
FULL = (
    f"{BASE} --position-embedding-type yarn --rotary-scaling-factor 32 "
    "--yarn-original-max-position-embeddings 4096 --yarn-beta-fast 16 --yarn-beta-slow 1 "
)


@pytest.mark.parametrize(
    ("more", "flags", "lacking"),
    [({"rms_norm_eps": 1e-6, "rope_theta": 5e5}, "--norm-epsilon 1e-06 --rotary-base 500000", ""),
     ({"rms_norm_eps": 1e-5, "rope_theta": 10000, "partial_rotary_factor": 0.25},
      "--norm-epsilon 1e-05 --rotary-base 10000 --rotary-percent 0.25", ""),
     ({"rope_theta": 5e5, "rope_scaling": LLAMA31},
      f"{EPSILON} --rotary-base 500000 --use-rope-scaling --rope-scaling-factor 8", ""),
     ({"rope_parameters": LLAMA31 | {"rope_theta": 5e5}},
      f"{EPSILON} --rotary-base 500000 --use-rope-scaling --rope-scaling-factor 8", ""),
     ({"rope_scaling": {"rope_type": "default"}, "rope_theta": 1e4}, BASE, ""),
     ({"rope_scaling": LLAMA31 | {"high_freq_factor": 2.0}}, BASE,
      "scaling of config.json (llama3)"),
     ({"rope_scaling": {"type": "linear", "factor": 4.0}},
      f"{BASE} --rotary-seq-len-interpolation-factor 4", ""),
     ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, BASE, "(dynamic)"),
     ({"rope_scaling": YARN | {"beta_fast": 16}},
      FULL + "--yarn-correction-range-round-to-int", ""),
     ({"rope_scaling": YARN | {"beta_fast": 16, "truncate": False}},
      FULL + "--no-yarn-correction-range-round-to-int", ""),
     ({"rope_scaling": YARN | {"attention_factor": 2.0}}, BASE, "(yarn)"),
     ({"rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}} | LATENT,
      f"{BASE} --rope-type yarn --rotary-scaling-factor 32 --mscale 0.707 --mscale-all-dim 0.707",
      ""),
     ({"rope_scaling": YARN | {"beta_fast": 16}} | LATENT, BASE, "(yarn)"),
     ({"rope_theta": 1234.5}, EPSILON, "a rotary base of 1234.5"),
     ({"rope_theta": 3580165449.0}, f"{EPSILON} --rotary-base 3580165449", ""),  # of 1M tokens
     ({"rope_theta": 1e4, "rope_scaling": False}, BASE, ""),
     ({"rope_theta": 1e6, "rope_local_base_freq": 1e4}, EPSILON, "in some layers"),
     ({"rope_parameters": {"full_attention": {"rope_theta": 1e6},
                            "sliding_attention": {"rope_theta": 1e4}}}, EPSILON,
      "some layers"),
     ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
      f"{EPSILON} --rotary-base 1000000", "")],
)  # fmt: skip
def test_norms_and_positions_of_a_configuration(more, flags, lacking):
    read = models.from_config(config(**more))
    assert read.family is not None
    assert read.family.numerics == flags
    assert lacking in " ".join(read.family.lacking)
    assert bool(read.family.lacking) is bool(lacking)
    said = list(model_flags.model_flags(read))
    assert said[-1] == flags or not flags
    position = "yarn" if "embedding-type yarn" in flags else "rope"
    assert " ".join(said).count("--position-embedding-type") == 1
    assert f"--position-embedding-type {position}" in " ".join(said)
    assert any(lacking in each for each in model_flags.lacking(read)) or not lacking
    assert "--rotary-base" not in pasted.left_to_the_user(read)


@pytest.mark.parametrize(
    ("more", "words"),
    [({"rms_norm_eps": "1e-6"}, "'rms_norm_eps' expected float, got str"),
     ({"rope_theta": float("inf")}, "'rope_theta' must be a number from 0"),
     ({"rope_scaling": "yarn"}, "'rope_parameters' with value 'yarn'"),
     ({"rope_scaling": YARN | {"factor": -1}}, "rope_parameters: 'factor' must be a number")],
)  # fmt: skip
def test_norms_and_positions_that_are_refused(more, words):
    with pytest.raises(ValueError, match=words):
        models.from_config(config(**more))


def test_a_tower_beside_the_text_model_is_named():
    fields = {"model_type": "of_nobody", "vision_config": {}}
    read = models.from_config(fields | {"text_config": config(), "tie_word_embeddings": True})
    assert read.tied
    assert "vision" in read.uncounted[0]


def test_a_megatron_command_of_a_latent_model():
    words = (
        "pretrain_gpt.py --num-layers 61 --hidden-size 7168 --num-attention-heads 128 --swiglu "
        "--ffn-hidden-size 18432 --multi-latent-attention --q-lora-rank 1536 --num-experts 256 "
        "--moe-router-topk 8 --moe-ffn-hidden-size 2048 --moe-layer-freq ([0]*3+[1]*58) "
        "--moe-shared-expert-intermediate-size 2048 --vocab-size 129280 --seq-length 4096 "
        "--untie-embeddings-and-output-weights --context-parallel-size 8 --burst-ulysses-size 2"
    )
    model, run = model_arguments.find(None, words.split())
    assert model.parameters == models.named("deepseek-v3").parameters
    assert (run["cp"], run["ulysses"]) == (8, 2)


@pytest.mark.parametrize(
    ("words", "letters"),
    [("--window-size 127,0 --window-attn-skip-freq 2", "WFWF"), ("--window-size 127,0", "WWWW"),
     ("--window-size (127,0) --window-attn-skip-freq [1,1,0,0]", "WWFF"),
     ("--hybrid-override-pattern M-*-", "M-*-"),
     ("--experimental-attention-variant gated_delta_net --linear-attention-freq 4", "LLLF"),
     ("--hybrid-layer-pattern GG*-", "MM*-")],
)  # fmt: skip
def test_a_megatron_command_of_other_layers(words, letters):
    base = "x --num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 64 "
    model, _ = model_arguments.find(None, (base + words).split())
    assert model.letters == letters
    assert model.window == (128 if "W" in letters else 0)


def test_layers_of_kimi_k3_are_not_counted():
    """Megatron-Bridge's provider names them by their numbers."""
    values = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 8, "kimi_kda_layers": [1]}
    with pytest.raises(
        ValueError, match="provider: layers of kda are not supported; pass the name"
    ):
        model_from(values.get, "provider", gated=True, tied=False, flag=str)


def test_a_bridge_recipe(monkeypatch, capsys):
    """A configuration with the attributes of Megatron-Bridge's, which need not be installed."""
    spec = SimpleNamespace(keywords={"base": None, "store": 0.5, "lm_head_loss": "single_pass"})
    provider = SimpleNamespace(
        num_layers=32, hidden_size=4096, num_attention_heads=32, num_query_groups=8,
        ffn_hidden_size=14336, gated_linear_unit=True, share_embeddings_and_output_weights=False,
        vocab_size=128256, seq_length=2**20, tensor_model_parallel_size=4, kv_channels=None,
        context_parallel_size=8, transformer_layer_spec=spec, recompute_granularity="full",
    )  # fmt: skip
    found = SimpleNamespace(
        model=provider, train=SimpleNamespace(micro_batch_size=2, global_batch_size=12),
        ddp=SimpleNamespace(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
    )  # fmt: skip
    monkeypatch.setattr(model_arguments, "recipe", lambda name: found)
    name = "llama3_8b_pretrain_32gpu_h100_1m"
    model, run = model_arguments.find(name, [])
    assert (run["micro_batch"], run["global_batch"]) == (2, 12)
    # 64 GPUs are 2 data-parallel ranks, each of 3 micro-batches of 2 sequences; 128 GPUs are 4.
    assert main(["memory", "--model", name, "--gpus", "64"]) in (0, 1)
    assert "\n12 sequences per step\n" in capsys.readouterr().out
    assert main(["memory", "--model", name, "--gpus", "128"]) == 2
    assert "a global batch of 12 sequences is not a multiple of 8" in capsys.readouterr().err
    assert model.layers == 32
    assert model.parameters == pytest.approx(models.named("llama3-8b").parameters, rel=1e-3)
    assert {name: run[name] for name in ("tp", "cp", "seq", "store", "lm_head_loss")} == {
        "tp": 4, "cp": 8, "seq": 2**20, "store": 0.5, "lm_head_loss": "single_pass",
    }  # fmt: skip
    provider.mtp_num_layers = 1
    model_arguments.find("llama3_8b_pretrain_32gpu_h100_1m", [])


def test_a_recipe_without_bridge_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(model_arguments.importlib, "import_module", _missing)
    with pytest.raises(ValueError, match=r"require Megatron-Bridge, .* or use a config\.json"):
        model_arguments.find("llama3_8b_pretrain_config", [])


def _missing(name):
    raise ImportError(f"No module named {name!r}")


def test_a_file_beats_a_recipe_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_config").mkdir()
    (tmp_path / "my_config" / "config.json").write_text(json.dumps(config()))
    model, _ = model_arguments.find("my_config", [])
    assert model.hidden == 256

"""Figures, settings and files that no run could have are refused by name, where they come in."""

import json
import math
import re
from dataclasses import replace

import pytest

from megatron_burst.autotune.clusters import GPUS, Cluster
from megatron_burst.plugins.tools.advise.account.memory import account
from megatron_burst.plugins.tools.advise.settings import Settings
from megatron_burst.plugins.tools.advise.shapes import models
from megatron_burst.plugins.tools.advise.simulate import simulate

# --- figures -----------------------------------------------------------------------------------

ABSENT = ("nvlink", "nic", "nic_rate")  # infinite where there are no such links


def wrong(names, values):
    """Each name with each value that it cannot have."""
    return [(n, v) for n in names for v in values if not (v == math.inf and n in ABSENT)]


@pytest.mark.parametrize(
    ("name", "value"),
    wrong(["memory", "peak", "host_link", "nvlink", "nic", "attention", "linear", "small"],
          [math.nan, -1.0, math.inf, True, "1"]),
)  # fmt: skip
def test_figures_that_no_gpu_has(name, value):
    with pytest.raises(ValueError, match=f"^gpu h100: {name} .*: {value!r}"):
        replace(GPUS["h100"], **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    wrong(["nics", "nic_rate", "host_rate", "host_memory", "reserve", "spread", "host_update",
           "overlap"], [math.nan, -1, math.inf, True]),
)  # fmt: skip
def test_figures_that_no_cluster_has(name, value):
    with pytest.raises(ValueError, match=f"^cluster: {name} {value!r} must be an? "):
        replace(Cluster("h100", 8), **{name: value})


@pytest.mark.parametrize(
    ("figures", "said"),
    [({"host_update": 0.0, "overlap": 1.5},
      "host_update 0.0 must be a finite number > 0; overlap 1.5 must be a fraction"),
     ({"nic_of": "neighbour"}, "nic_of 'neighbour' must be one of neighbours, stride"),
     ({"gpus": 8.0}, "--gpus 8.0 --per-node 8: both must be integers >= 1"),
     ({"per_node": 0}, "--gpus 8 --per-node 0: both must be integers >= 1")],
)  # fmt: skip
def test_all_figures_of_a_cluster_are_named(figures, said):
    with pytest.raises(ValueError, match=said):
        replace(Cluster("h100", 8), **figures)


# --- runs --------------------------------------------------------------------------------------

LLAMA, H100 = models.named("llama3-8b"), Cluster("h100", 8)
WRONG = [
    ({"cp": 1.5}, "--cp must be an integer >= 1, got 1.5"),
    ({"cp": True}, "--cp must be an integer >= 1, got True"),
    ({"seq": "1M"}, "--seq must be an integer >= 1, got '1M'"),
    ({"intra": 0}, "--intra must be an integer >= 1, got 0"),
    ({"micro_batch": math.nan}, "--micro-batch must be an integer >= 1, got nan"),
    ({"recompute": "half"}, "--recompute must be one of none, full, got 'half'"),
    ({"gradients": 4}, "--gradients must be one of fp32, bf16, got 4"),
    ({"lm_head_loss": "on", "placement": "x"}, "recompute, got 'on'; --placement must be one of"),
    ({"route": "fast"}, "--route must be one of auto, ring, direct"),
    ({"wire": []}, r"--wire must be one of fp32, bf16"),
    ({"path": "tpu"}, "--path must be one of gpu, cpu"),
    ({"fsdp": "no"}, "--fsdp must be true or false, got 'no'"),
    ({"layout": 3}, "--layout must be a string, got 3"),
    ({"store": math.nan}, "--store must be from 0 to 1, got nan"),
    ({"store": "0.5"}, "--store must be from 0 to 1, got '0.5'"),
    ({"optimizer_bytes": -1}, "--optimizer-bytes must be an integer >= 0, got -1"),
    ({"logits_bytes": -6}, "--logits-bytes must be an integer >= 0, got -6"),
    ({"mlp_tiles": 10**9}, "--mlp-tiles 1000000000 exceeds the 512 rows"),
    ({"sequence_chunks": 513}, "--sequence-chunks 513 exceeds .* use at most 512"),
    ({"tp": 3}, "--tp 3 does not divide the 32 heads .* use one of 1, 2, 4"),
    ({"seq": 1000, "cp": 16}, "--seq 1000 is not a multiple of 2 x --cp 16"),
    ({"pp": 3}, "--pp 3 .* 32 layers of llama3-8b equally; use .* 1, 2, 4"),
    ({"vpp": 2}, "requires --pp"),
    ({"ep": 2}, "requires experts"),
    ({"sequence_chunks": 2, "cp": 1}, "requires --cp above 1"),
    ({"recompute": "none", "store": 0.5}, "--recompute full"),
    ({"recompute": "none", "offload": 0.5}, "--recompute full"),
    ({"cp": 8, "ulysses": 3}, "use one of 1, 2, 4"),
    ({"cp": 4, "ulysses": 2, "algorithm": "ulysses"}, "--ulysses 4"),
    ({"cp": 4, "algorithm": "hybrid"}, "--ulysses 2"),
    ({"head_chunks": 3}, "--head-chunks 3 does not divide the 8"),
]


@pytest.mark.parametrize(("fields", "said"), WRONG)
def test_settings_that_no_run_has(fields, said):
    run = replace(Settings(1024, cp=2), **fields)
    for door in (lambda: simulate(LLAMA, H100, run), lambda: account(LLAMA, run)):
        with pytest.raises(ValueError, match=said):
            door()


@pytest.mark.parametrize("part", ["attention", "layer", "step"])
def test_a_run_that_the_cluster_does_not_hold(part):
    run = Settings(2**16, tp=4, cp=4, pp=2, dp=2)
    groups = r"requires 64 GPUs \(--tp 4 x --cp 4 x --pp 2 x --dp 2\), and the cluster has 8; use"
    with pytest.raises(ValueError, match=groups):
        simulate(LLAMA, H100, run, part=part)


def test_interleaved_stages_take_whole_rounds_of_micro_batches():
    """As Megatron does; memory is that of any number."""
    run = Settings(2**13, pp=4, vpp=2, micro_batches=6)
    with pytest.raises(ValueError, match=r"--micro-batches 6 is not a multiple of --pp 4"):
        simulate(LLAMA, H100, run)
    assert simulate(LLAMA, H100, run, part="layer").seconds > 0
    assert account(LLAMA, run).peak.bytes > 0


# --- models ------------------------------------------------------------------------------------

SHAPE = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 256,
         "num_attention_heads": 8, "intermediate_size": 512, "vocab_size": 1000}  # fmt: skip


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"{", "not a JSON file"), (b"\xff\xfe{}", "not a JSON file: .*utf-8"),
     (b"[1]", r"must hold a JSON object \{...\}, got \[1\]"), (b"null", "got None"),
     (b"[" * 10**5, "not a JSON file"), (b"{}", "has no 'model_type'")],
    ids=lambda value: value[:9],
)  # fmt: skip
def test_a_configuration_that_is_none(tmp_path, content, said):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=f"config.json: .*{said}"):
        models.named(str(tmp_path))


@pytest.mark.parametrize(
    ("more", "said"),
    [({"model_type": None}, "has no 'model_type'"),
     ({"model_type": 3}, "'model_type' must be a string, got 3"),
     ({"hidden_size": "256"}, ".* 'hidden_size' expected int, got str"),
     ({"num_hidden_layers": 4.0}, ".* 'num_hidden_layers' expected int, got float"),
     ({"num_attention_heads": True}, ".* 'num_attention_heads' expected int, got bool"),
     ({"vocab_size": [1]}, ".* 'vocab_size' expected int, got list"),
     ({"intermediate_size": [512]}, ".* 'intermediate_size' expected int, got list"),
     ({"sliding_window": "all"}, "unknown fields 'sliding_window'"),
     ({"model_type": "mistral", "sliding_window": "all"}, ".* 'sliding_window'"),
     ({"qk_rope_head_dim": "8", "kv_lora_rank": 8}, "'qk_rope_head_dim' must be an integer"),
     ({"head_dim": -1}, "'head_dim' must be"),
     ({"tie_word_embeddings": "false"}, ".* 'tie_word_embeddings' expected bool, got str"),
     ({"layer_types": "full"}, ".*layer_type"),
     ({"layer_types": [["full_attention"]] * 4}, "transformers cannot create model_type 'llama'"),
     ({"num_experts": 4, "num_experts_per_tok": "2"}, "'num_experts_per_tok' must be"),
     ({"num_experts": 4, "mlp_only_layers": [{}]}, "'mlp_only_layers' must be a list of integers"),
     ({"hidden_size": 10**20}, r"'hidden_size' must be at most 1,000,000,000, got 1e\+20"),
     ({"model_type": "mamba2"}, "model_type 'mamba2' has no attention layers"),
     ({"num_attention_heads": 0}, "transformers cannot create model_type 'llama'")],
    ids=str,
)  # fmt: skip
def test_fields_that_no_configuration_has(tmp_path, more, said):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SHAPE | more))
    with pytest.raises(ValueError, match=f"config.json: {said}"):
        models.named(str(path))


def test_null_is_no_field():
    shape = SHAPE | {"model_type": "mixtral", "first_k_dense_replace": None, "num_local_experts": 2,
                     "num_experts_per_tok": 1}  # fmt: skip
    assert models.from_config(shape | {"head_dim": None}).head_dim == 32


@pytest.mark.parametrize(
    ("fields", "said"),
    [({"layers": 32.0, "experts": True}, "layers must be .* got 32.0; experts must be .* got True"),
     ({"window": -1}, "window must be an integer >= 0, got -1"),
     ({"hidden": "4096"}, "hidden must be an integer >= 0, got '4096'"),
     ({"tied": "no"}, "tied must be true or false, got 'no'")],
)  # fmt: skip
def test_sizes_that_no_model_has(fields, said):
    with pytest.raises(ValueError, match=f"^model llama3-8b: {said}"):
        replace(LLAMA, **fields)


@pytest.mark.parametrize(
    ("name", "told"),
    [("qwen3-next", "did you mean qwen3-next-80b-a3b? (advise without --model lists"),
     ("LLama3-8", "did you mean llama3-8b? (advise"),
     ("lama2-7b", "did you mean llama2-7b? (advise"),
     ("of my own", "path of a config.json; names: llama2-7b")],
)  # fmt: skip
def test_a_model_without_a_name_that_is_known(name, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        models.named(name)

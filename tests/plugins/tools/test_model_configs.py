"""Configurations of published models: layers and parameters, or the field that is refused.

`published_configs.json` has the fields that describe shapes, from the `config.json` at `source`;
layers by kind are counted by hand from these fields and the papers, parameters are those that the
makers state, without parts that are not the language model.
"""

import json
import sys
from pathlib import Path

import pytest

from megatron_burst.cli.main import main
from megatron_burst.plugins.tools.advise.search.model_flags import lacking, model_flags
from megatron_burst.plugins.tools.advise.shapes import models
from megatron_burst.plugins.tools.advise.shapes.model import Model

transformers = pytest.importorskip("transformers")
import torch  # noqa: E402

PUBLISHED = {
    one["name"]: one
    for one in json.loads((Path(__file__).parent / "published_configs.json").read_text())
}
COUNTED = [name for name, one in PUBLISHED.items() if "refused" not in one]
REFUSED = [name for name, one in PUBLISHED.items() if "refused" in one]
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
         "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1000}  # fmt: skip


def read(name):
    return models.from_config(PUBLISHED[name]["config"])


def flags(model):
    return " ".join(model_flags(model))


@pytest.mark.parametrize("name", COUNTED)
def test_layers_and_parameters_of_published_models(name):
    said, model = PUBLISHED[name], read(name)
    found = {"full": model.number_of("full"), "window": model.windows, "chunked": model.chunked,
             "linear": model.mixers, "experts": model.moe_layers, "kv_heads": model.kv_heads,
             "part": any("not the language model" in part for part in model.uncounted)}  # fmt: skip
    stated = {key: said[key] for key in found if key in said}
    assert {key: found[key] for key in stated} == stated
    if said["billions"] is not None:
        assert model.parameters / 1e9 == pytest.approx(said["billions"], rel=0.03)
    assert ("--window-size" in flags(model)) is bool(model.windows)
    assert ("--window-attn-skip-freq" in flags(model)) is (0 < model.windows < model.layers)


@pytest.mark.parametrize("name", REFUSED)
def test_published_models_that_are_refused_by_their_field(name):
    with pytest.raises(ValueError, match=r"config\.json: ") as caught:
        read(name)
    assert PUBLISHED[name]["refused"] in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("folder", ["qwen3-distilled", "llama3-finetuned", "gemma-3", "mine"])
def test_flags_follow_the_model_type_and_never_the_path(tmp_path, folder):
    path = tmp_path / folder / "config.json"
    path.parent.mkdir()
    for kind, norms in (("llama", False), ("qwen3", True)):
        path.write_text(json.dumps({"model_type": kind, "head_dim": 32, **SMALL}))
        words = flags(models.named(str(path)))
        assert ("--qk-layernorm" in words) is norms
        assert "--apply-layernorm-1p" not in words


def test_biases_of_attention_and_of_all_matrices():
    llama = models.from_config({"model_type": "llama", "attention_bias": True, **SMALL})
    assert "--add-qkv-bias" in flags(llama)
    assert any("the output projection of attention" in line for line in lacking(llama))
    qwen = models.from_config({"model_type": "qwen2", **SMALL})
    assert "--add-qkv-bias" in flags(qwen)
    assert not lacking(qwen)
    words = flags(read("StarCoder2 3B"))
    assert "--disable-bias-linear" not in words
    assert "--add-qkv-bias" not in words
    assert "--normalization LayerNorm" in words
    assert "--swiglu" not in words


@pytest.mark.parametrize(
    ("whole", "part", "tied"),
    [({}, {}, False), ({}, {"tie_word_embeddings": True}, True),
     ({"tie_word_embeddings": True}, {"tie_word_embeddings": False}, True)],
)  # fmt: skip
def test_the_lm_head_of_a_multimodal_model(whole, part, tied):
    """Mistral Small 3.1 states nothing and is not tied, whatever its class defaults to."""
    fields = {"model_type": "mistral3", "text_config": {"model_type": "mistral", **SMALL, **part}}
    assert models.from_config(fields | whole).tied is tied


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"layer_group_size": 5}, "layer_group_size"),
        ({"attn_layer_indices": [3]}, "attn_layer_indices"),
        ({"ffn_config": {"moe_num_experts": 8}}, "ffn_config"),
        ({"model_type": "mimo_v2_flash", "swa_head_dim": 64}, "swa_head_dim"),
        ({"block_configs": [{}] * 4}, "block_configs"),
    ],
)  # fmt: skip
def test_a_field_that_is_not_understood_is_named(fields, named):
    with pytest.raises(ValueError, match=rf"config\.json: .*{named}") as caught:
        models.from_config(SMALL | {"model_type": "llama"} | fields)
    assert "\n" not in str(caught.value)


def test_a_model_type_that_transformers_does_not_have(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "of_nobody", **SMALL}))
    assert main(["advise", "--model", str(tmp_path), "--gpus", "8", "--seq", "8K"]) == 2
    said = capsys.readouterr().err
    assert (
        f"config.json: transformers {transformers.__version__} has no model_type 'of_nobody'; "
        in (said)
    )
    assert "upgrade transformers, or describe the model by a Megatron command after --" in said
    assert said.count("\n") == 1


def test_the_router_of_glm_and_of_trinity():
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}
    glm = {"model_type": "glm4_moe", "n_routed_experts": 8, "first_k_dense_replace": 1,
           "routed_scaling_factor": 2.5}  # fmt: skip
    words = flags(models.from_config({**SMALL, **experts, **glm}))
    assert "--moe-router-score-function sigmoid --moe-router-enable-expert-bias" in words
    assert "--moe-router-topk-scaling-factor 2.5" in words
    trinity = {"model_type": "afmoe", "num_experts": 8, "num_shared_experts": 1,
               "num_dense_layers": 1, "route_scale": 2.826, "sliding_window": 64}  # fmt: skip
    words = flags(models.from_config({**SMALL, **experts, **trinity}))
    assert "--moe-router-topk-scaling-factor 2.826" in words


def test_numerics_under_older_names():
    older = {"layer_norm_epsilon": 1e-6, "rotary_emb_base": 1000000, "rotary_pct": 0.5}
    words = flags(models.from_config({"model_type": "exaone", **SMALL, **older}))
    assert "--normalization RMSNorm" in words
    assert "--norm-epsilon 1e-06 --rotary-base 1000000 --rotary-percent 0.5" in words


@pytest.mark.parametrize("name", ["OLMo 2 7B", "OLMo 3 7B", "EXAONE 4.0 32B"])
def test_norms_behind_each_half_have_no_flag(name):
    assert any("not before them" in line for line in lacking(read(name)))
    assert not any("norms after" in line for line in lacking(read("Qwen3 8B")))


def test_chunked_attention_is_no_window():
    model = read("Llama 4 Scout (text)")
    words = flags(model)
    assert "--window" not in words
    assert "--no-rope-freq '[0,0,0,1,0,0,0,1," in words
    assert any("chunks of 8,192 tokens" in line and "36 layers" in line for line in lacking(model))


def test_experts_in_every_second_layer():
    assert f"--moe-layer-freq '({'+'.join(['[0]*1+[1]*1'] * 24)})'" in flags(
        read("Llama 4 Maverick")
    )


def test_a_chunk_counts_as_a_window_with_as_many_pairs():
    """Four chunks of 8 tokens: 8 x 9 / 2 pairs in each."""
    model = Model("chunks", 2, 64, 4, 4, 128, 100, pattern="CF", chunk=8)
    assert model.kinds == {"full": 1, "chunked": 1}
    window = model.window_of("chunked", 32)
    pairs = sum(min(row + 1, window) for row in range(32))
    assert window == 4
    assert pairs == pytest.approx(4 * 8 * 9 / 2, rel=0.2)
    assert model.window_of("chunked", 8) == 0  # one chunk: full attention
    assert model.window_of("full", 32) == 0
    with pytest.raises(ValueError, match="C layers require chunk >= 1, got 0"):
        Model("chunks", 2, 64, 4, 4, 128, 100, pattern="CF")


def test_a_pattern_of_experts():
    model = Model("moe", 4, 64, 4, 4, 32, 100, experts=4, top_k=1, moe_layers=2, dense_ffn=128,
                  expert_pattern="0101")  # fmt: skip
    assert [part.sparse for part in model.parts] == [False, True, False, True]
    with pytest.raises(
        ValueError, match="expert_pattern '0111' must have 0 or 1 for each of the 4"
    ):
        Model("moe", 4, 64, 4, 4, 32, 100, experts=4, top_k=1, moe_layers=2, expert_pattern="0111")


def test_a_model_with_other_parameters_is_refused_with_both_counts():
    small = {key: value for key, value in SMALL.items() if key != "num_hidden_layers"}
    with pytest.raises(ValueError, match=r"'longcat_flash' is not supported: its fields give "
                       r"[\d.]+ billion parameters, but transformers' model has \d"):  # fmt: skip
        models.from_config({"model_type": "longcat_flash", "num_layers": 2, **small})


def test_a_field_that_transformers_does_not_read_is_refused():
    fields = {"model_type": "llama", "sliding_window": 64, **SMALL}
    with pytest.raises(ValueError, match=r"unknown fields 'sliding_window' .64., which may"):
        models.from_config(fields)
    assert models.from_config(fields | {"sliding_window": None}).windows == 0


def test_a_wrong_type_is_one_line_with_the_field():
    with pytest.raises(ValueError, match="'hidden_size'") as caught:
        models.from_config({"model_type": "llama", **SMALL, "hidden_size": "256"})
    assert "\n" not in str(caught.value)


def test_without_transformers_one_line_has_the_command(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SMALL}))
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["memory", "--model", str(tmp_path), "--gpus", "8", "--seq", "8K"]) == 2
    said = capsys.readouterr().err
    assert "pip install 'megatron-burst[advise]'" in said
    assert said.count("\n") == 1


def test_json_has_the_layers_and_the_parameters(tmp_path, capsys):
    fields = {"model_type": "gemma3_text", "sliding_window": 512, "layer_types":
              ["sliding_attention"] * 3 + ["full_attention"], **SMALL}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    words = ["advise", "--model", str(tmp_path), "--gpus", "2", "--seq", "4K", "--top", "1"]
    fixed = ["--tp", "1", "--cp", "2", "--pp", "1", "--store", "0"]
    assert main([*words, *fixed, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layers"] == {"full": 1, "window": 3}
    assert main([*words, *fixed]) == 0
    assert "layers: 1 full attention, 3 window of 512" in capsys.readouterr().out


# --- all model types of transformers -----------------------------------------------------------

KINDS = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
SAMPLE = ("arcee", "blt", "cohere2", "cwm", "doge", "exaone4", "gemma", "glm4", "gpt_neo", "lfm2",
          "longcat_flash", "modernbert-decoder", "olmo3", "phimoe", "qwen2_moe", "xlnet",
          "zamba2")  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # transformers', of its own defaults
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind in SAMPLE else pytest.mark.slow) for kind in KINDS],
)
def test_every_model_type_is_counted_or_refused_by_name(kind):
    """With the defaults of its class, whose values count as a file's."""
    try:
        config = transformers.AutoConfig.for_model(kind)
        text = config.get_text_config()
        fields = json.loads(json.dumps(config.to_dict(), default=str)) | {"model_type": kind}
    except Exception:  # some classes have no defaults, or two language models
        config, text, fields = None, None, {"model_type": kind}
    model, said = None, ""
    try:
        model = models.from_config(fields)
    except ValueError as error:
        said = str(error)
    if model is None:
        names = [kind, *fields, *(text.to_dict() if text is not None else ()), "num_hidden_layers",
                 "layer_types"]  # fmt: skip
        assert any(f"'{name}'" in said for name in [*names, getattr(text, "model_type", kind)])
        return
    types = list(getattr(text, "layer_types", None) or [])
    assert model.windows == types.count("sliding_attention") or not types
    assert model.chunked == types.count("chunked_attention")
    # The language model of `moss_transcribe_diarize` shares its embedding as the whole model says.
    text.tie_word_embeddings |= config.tie_word_embeddings
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(
            text if text.model_type in KINDS else config
        )
    assert model.parameters == pytest.approx(made.num_parameters(), rel=0.03)

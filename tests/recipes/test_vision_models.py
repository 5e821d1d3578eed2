"""Vision-language models of Bridge: supported ones over ranks equal one rank.

These are Qwen2.5-VL, Qwen3-VL and Gemma 3 VL; others are refused.
"""

import itertools
import types

import pytest
import torch

WAYS = [
    ("qwen2.5", 2, "zigzag"), ("qwen2.5", 4, "contiguous"), ("qwen3", 2, "contiguous"),
    ("qwen3", 4, "zigzag"), ("qwen3 moe", 2, "zigzag"),
]  # fmt: skip
ALL = itertools.product(("qwen2.5", "qwen3", "qwen3 moe"), (2, 4), ("zigzag", "contiguous"))
SLOW = [pytest.param(*way, marks=pytest.mark.slow) for way in ALL if way not in WAYS]


@pytest.fixture(scope="module")
def qwen(serve):
    known = {}

    def run(model, ranks, layout="zigzag"):
        if (model, ranks, layout) not in known:
            code, text, found = serve(ranks, vision=layout, model=model)
            assert code == 0, text[-3000:]
            known[model, ranks, layout] = found
        return known[model, ranks, layout]

    return run


@pytest.mark.parametrize(("model", "ranks", "layout"), [*WAYS, *SLOW])
def test_qwen_over_ranks_equals_one_rank(qwen, model, ranks, layout):
    (loss, norms), (whole, wanted) = qwen(model, ranks, layout), qwen(model, 1)
    assert loss == pytest.approx(whole, rel=1e-6)
    assert norms.keys() == wanted.keys()
    assert norms == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    for name in ("patch_embed.proj", *(["deepstack_merger_list.1.linear_fc2"] * (model[4] == "3"))):
        eyes = "visual" if model == "qwen2.5" else "vision_model"
        assert wanted[f"{eyes}.{name}.weight"] > 0.1  # the encoder learns


@pytest.mark.parametrize(
    ("model", "ranks", "layout"),
    [("gemma3 vl", 2, "zigzag"), ("gemma3 vl", 4, "contiguous"), ("gemma3", 2, "contiguous")],
)
def test_gemma_over_ranks_equals_one_rank(qwen, model, ranks, layout):
    """The reference uses Bridge's dense masks; every second layer has a window."""
    (loss, norms), (whole, wanted) = qwen(model, ranks, layout), qwen(model, 1)
    assert loss == pytest.approx(whole, rel=1e-6)
    assert norms == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    if model == "gemma3 vl":
        assert wanted["vision_tower.vision_model.embeddings.patch_embedding.weight"] > 0.1


@pytest.mark.usefixtures("bridge_here")
@pytest.mark.parametrize(
    ("name", "changes", "word"),
    [
        ("qwen2.5", {"sequence_parallel": True, "tensor_model_parallel_size": 2},
         "--sequence-parallel with Qwen25VLModelProvider"),
        ("qwen3", {"recompute_granularity": "full", "recompute_method": "uniform",
                   "recompute_num_layers": 1},
         "--recompute-granularity full with Qwen3VLModelProvider"),
    ],
)  # fmt: skip
def test_what_qwen_excludes(name, changes, word):
    import qwen

    from megatron_burst.plugins.vision.recipes import problems as vision_problems

    model = qwen.provider(2, name, **changes)
    (problem,) = vision_problems(model, model)
    assert word in str(problem)
    assert not [*vision_problems(qwen.provider(1, name), qwen.provider(1, name))]


@pytest.mark.usefixtures("bridge_here")
def test_what_gemma_excludes():
    """Also tests the mask that it gets, unless the recipe states one."""
    from megatron.bridge.models.gemma_vl import Gemma3VLModelProvider

    from megatron_burst.plugins.vision.recipes import problems as vision_problems
    from megatron_burst.plugins.vision.recipes import with_mask
    from megatron_burst.recipes import apply_burst
    from megatron_burst.recipes.layers import fields_of

    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    model = Gemma3VLModelProvider(
        context_parallel_size=2, pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32, **sizes,
    )  # fmt: skip
    (problem,) = vision_problems(model, model)
    assert "--pipeline-model-parallel-size 2 with Gemma3VLModelProvider" in str(problem)
    for choices, mask in (
        ({}, "megatron_burst.plugins.vision.images:gemma3"),
        ({"mask": "m:f"}, "m:f"),
    ):
        model = Gemma3VLModelProvider(**sizes, context_parallel_size=2)
        apply_burst(types.SimpleNamespace(model=model), **choices)
        assert with_mask(model, fields_of(model.transformer_layer_spec))["mask"] == mask
        assert with_mask(model, {"algorithm": "megatron"}) == {"algorithm": "megatron"}
        model.context_parallel_size = 1  # an override after it
        assert with_mask(model, fields_of(model.transformer_layer_spec)) == choices


@pytest.mark.usefixtures("bridge_here")
def test_dense_gemma_4_is_not_recomputed_whole():
    """A class with this name, because Bridge 0.3 has no such provider."""
    from megatron_burst.recipes.own_attention import gemma4_problems

    dense = type("Gemma4DenseProvider", (), {"recompute_granularity": "full"})()
    (problem,) = gemma4_problems(dense, dense)
    assert "Gemma4DenseProvider: Bridge passes a pair of rotary tables" in str(problem)
    dense.recompute_granularity = "selective"
    assert not [*gemma4_problems(dense, dense)]


def test_bridge_knows_how_sinks_are_shared():
    """By the name of their module's class; otherwise Bridge converts no weights of gpt-oss."""
    from megatron.bridge.models.conversion.param_mapping import AutoMapping

    from megatron_burst.recipes.own_attention import name_to_bridge

    name_to_bridge()
    mapping = AutoMapping("decoder.layers.0.self_attention.core_attention.softmax_offset", "x")
    for name in ("BurstCoreAttention", "BurstMiMoV2FlashTEDotProductAttention"):
        module = type(name, (torch.nn.Module,), {})()
        assert mapping._detect_parallelism_type(module) == "column"


@pytest.mark.usefixtures("bridge_here")
def test_the_launcher_hands_over_images():
    """Bridge's step of text models omits them without an error."""
    from megatron_burst.cli.recipe import _forward_step

    for model, step in (({"vision_config": None}, "vlm_step"), ({}, "gpt_step")):
        recipe = types.SimpleNamespace(model=types.SimpleNamespace(**model))
        assert _forward_step(recipe).__module__ == f"megatron.bridge.training.{step}"


@pytest.mark.usefixtures("bridge_here")
def test_a_revision_is_no_vision():
    """Providers of Bridge 0.6 have the revision of the model on the hub.

    Text models of Gemma 3 state whether they belong to one with images.
    """
    from megatron_burst.recipes.vision_models import is_vision

    text = types.SimpleNamespace(hf_model_revision=None, is_vision_language=True)
    assert not is_vision(text)
    assert is_vision(types.SimpleNamespace(vision_config=None))


@pytest.mark.usefixtures("bridge_here")
@pytest.mark.parametrize(
    ("home", "name", "word"),
    [
        ("ministral3", "Ministral3ModelProvider", "their own scales"),
        ("glm_vl", "GLM45VModelProvider", "splits sequences between ranks in its own way"),
    ],
)
def test_others_are_refused_by_name(home, name, word):
    import importlib

    from megatron_burst.recipes import apply_burst

    kind = getattr(importlib.import_module(f"megatron.bridge.models.{home}"), name)
    model = kind(num_layers=2, hidden_size=64, num_attention_heads=4)
    with pytest.raises(ValueError, match=f"^recipe: {name} is a vision-language") as told:
        apply_burst(types.SimpleNamespace(model=model))
    assert word in str(told.value)
    assert "supports Gemma 3 VL, Qwen2.5-VL" in str(told.value)

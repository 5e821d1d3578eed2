"""Vision-language models of Bridge: Qwen2.5-VL over ranks equals one rank with Megatron's own
attention, others are refused."""

import types

import pytest


@pytest.fixture(scope="module")
def qwen(serve):
    known = {}

    def run(ranks, layout="zigzag"):
        if (ranks, layout) not in known:
            code, text, found = serve(ranks, vision=layout)
            assert code == 0, text[-3000:]
            known[ranks, layout] = found
        return known[ranks, layout]

    return run


@pytest.mark.parametrize(
    ("ranks", "layout"), [(2, "zigzag"), (2, "contiguous"), (4, "zigzag"), (4, "contiguous")]
)
def test_qwen_over_ranks_equals_one_rank(qwen, ranks, layout):
    (loss, norms), (whole, wanted) = qwen(ranks, layout), qwen(1)
    assert loss == pytest.approx(whole, rel=1e-6)
    assert norms.keys() == wanted.keys()
    assert norms == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    assert wanted["visual.patch_embed.proj.weight"] > 0.1  # the encoder learns


@pytest.mark.usefixtures("bridge_here")
def test_qwen_with_sequence_parallelism_is_refused():
    import qwen

    from megatron_burst.recipes.vision import vision_problems

    model = qwen.provider(2, sequence_parallel=True, tensor_model_parallel_size=2)
    (problem,) = vision_problems(model, model)
    assert "--sequence-parallel with Qwen25VLModelProvider" in str(problem)
    assert not [*vision_problems(qwen.provider(1), qwen.provider(1))]


@pytest.mark.usefixtures("bridge_here")
@pytest.mark.parametrize(
    ("home", "name", "word"),
    [
        ("gemma_vl", "Gemma3VLModelProvider", "dense mask of the whole sequence"),
        ("ministral3", "Ministral3ModelProvider", "scales of their own"),
        ("qwen_vl", "Qwen3VLModelProvider", "features of images in between"),
        ("glm_vl", "GLM45VModelProvider", "shares sequences between ranks in its own way"),
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
    assert "supports Qwen2.5-VL" in str(told.value)

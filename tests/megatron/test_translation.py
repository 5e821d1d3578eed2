"""Messages of building and training a model name the user's own terms.

These are flags in a script, and settings in a recipe.
"""

import functools
from types import SimpleNamespace

import pytest
import torch

import megatron_burst.megatron as burst
from megatron_burst.config import FIELDS
from megatron_burst.megatron import patching, specs
from megatron_burst.megatron.data import slicing
from megatron_burst.megatron.data.cut import BatchCut
from megatron_burst.megatron.lm_head import fused_loss
from megatron_burst.recipes.apply import apply_burst
from megatron_burst.recipes.kinds import translated

MODEL = SimpleNamespace(seq_length=66, context_parallel_size=2, lm_head_loss="off")
GROUP = SimpleNamespace(size=lambda: 2, rank=lambda: 0)


def wrong_length():
    slicing._shard(torch.zeros(1, 66), "striped", GROUP, 1)


def masked_pack():
    slicing.take(
        {"attention_mask": torch.zeros(1, 1, 8, 8)}, (None, None), BatchCut("striped"), 2, 0
    )


def two_packs():
    slicing.take({"tokens": torch.zeros(2, 8)}, (None, None), BatchCut("striped"), 2, 0)


def not_a_gpt():
    fused_loss._check_model(SimpleNamespace(output_layer=None), "single_pass")


@pytest.fixture
def installed():
    burst.install("striped")
    yield
    burst.uninstall()


@pytest.mark.parametrize(
    ("wrong", "flags", "settings"),
    [
        (wrong_length, "--seq-length 66 is not divisible by 2 x --context-parallel-size",
         "model.seq_length 66 is not divisible by 2 x model.context_parallel_size"),
        (not_a_gpt, "--burst-lm-head-loss single_pass supports GPT", "lm_head_loss single_pass"),
        (two_packs, "require --micro-batch-size 1", "require train.micro_batch_size 1"),
        # A setting of the data, which recipes of different data call differently.
        (masked_pack, "pass --no-create-attention-mask-in-dataloader",
         "pass --no-create-attention-mask-in-dataloader"),
    ],
)  # fmt: skip
def test_errors_name_what_the_user_wrote(installed, wrong, flags, settings):
    with pytest.raises(ValueError, match=f"(?s){flags}"):
        wrong()
    patching.translate_with(functools.partial(translated, MODEL))
    with pytest.raises(ValueError, match=f"(?s)^.*{settings}") as raised:
        wrong()
    assert flags not in str(raised.value) or flags == settings
    patching.translate_with(None)
    with pytest.raises(ValueError, match=f"(?s){flags}"):
        wrong()


def test_the_next_installation_starts_with_flags(installed):
    patching.translate_with(functools.partial(translated, MODEL))
    burst.uninstall()
    burst.install("striped")
    with pytest.raises(ValueError, match="--seq-length 66"):
        wrong_length()


def test_recipes_have_an_argument_for_each_flag_and_no_other():
    """Except for --burst-pack, which was not tested with recipes."""
    with pytest.raises(ValueError, match="nonsense is not an argument of apply_burst") as raised:
        apply_burst(None, nonsense=1)
    arguments = str(raised.value).split(" use ")[1].split(", ")
    assert sorted(arguments) == sorted(
        translated(MODEL, field.flag) for name, field in FIELDS.items() if name != "pack"
    )


def test_a_layer_spec_is_refused_with_all_reasons_at_once():
    config = SimpleNamespace(
        context_parallel_size=2, tensor_model_parallel_size=1, num_attention_heads=4,
        num_query_groups=None, attention_dropout=0.1, attention_backend="local", seq_length=66,
    )  # fmt: skip
    try:
        with pytest.raises(ValueError, match=r"^3 settings are not supported:") as raised:
            specs.burst_layer_spec(config, layout="zigzag")
    finally:
        burst.uninstall()
    for reason in ("--attention-backend local", "--seq-length 66", "attention dropout is 0.1"):
        assert f"\n  - {reason}" in str(raised.value)


@pytest.mark.parametrize(("size", "layout"), [(2, "balanced"), (1, "zigzag")])
def test_a_layer_spec_packs_documents_in_the_layout_of_the_flags(size, layout):
    config = SimpleNamespace(context_parallel_size=size, hidden_size=8, num_layers=1)
    options = specs.choices_with_layout({"algorithm": "burst", "pack": "documents"}, config)
    assert options.layout == layout


@pytest.mark.parametrize("size", [(8, None), (None, 0), (8, 0, 0), (-2, 0), (True, 0)])
def test_a_window_with_other_limits_is_refused(size):
    from megatron_burst.megatron.checks.config import _window_problems

    (problem,) = _window_problems(size)
    assert "or -1 for no limit" in str(problem)

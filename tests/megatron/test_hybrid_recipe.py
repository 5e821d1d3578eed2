"""Recipes of models with linear layers: the messages of the check before training; no Bridge."""

from functools import partial
from types import SimpleNamespace

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_burst.megatron.patching import HYBRID_SINCE, core_version
from megatron_burst.recipes import apply_burst, validate
from megatron_burst.recipes.layers import burst_layer_spec

OLD = core_version() < HYBRID_SINCE
DELTA_NET = {"experimental_attention_variant": "gated_delta_net"}


def recipe(settings=None, **choices):
    model = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, context_parallel_size=2,
        attention_dropout=0.0,
    )  # fmt: skip
    vars(model).update({"seq_length": 64} | (settings or {}))
    model.transformer_layer_spec = partial(burst_layer_spec, base=None, **choices)
    return SimpleNamespace(model=model, dist=None)


@pytest.mark.skipif(not OLD, reason="newer ones pass states")
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (DELTA_NET, "^model.experimental_attention_variant gated_delta_net at model.context_para"),
        ({"is_hybrid_model": True}, "^a hybrid model at model.context_parallel_size 2"),
    ],
)
def test_states_are_refused_by_name_below_the_oldest(settings, named):
    with pytest.raises(ValueError, match=f"{named}.*: .* requires Megatron-Core 0.19 or newer"):
        validate.check(recipe(settings))
    validate.check(recipe(settings, linear="megatron", algorithm="burst"))


@pytest.mark.skipif(OLD, reason="older ones refuse it")
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_states_fit_from_the_oldest_on(layout):
    apart = {} if layout == "zigzag" else {"attention_layout": "zigzag"}
    validate.check(recipe(DELTA_NET, layout=layout, **apart))


@pytest.mark.parametrize(
    ("settings", "choices", "message"),
    [
        ({}, {"layout": "striped", "attention_layout": "zigzag"},
         "^attention_layout zigzag does not work with layout striped: .* add layout contiguous"),
        ({"linear_cp_layout": "contiguous"}, {"layout": "zigzag"},
         "^model.linear_cp_layout contiguous and .* contradict layout zigzag"),
        ({"is_hybrid_model": True}, {"layout": "auto"},
         "^layout auto counts layers, and this configuration of a hybrid model does not state"),
    ],
)  # fmt: skip
def test_layouts_that_do_not_fit_are_named(settings, choices, message):
    with pytest.raises(ValueError, match=message):
        validate.check(recipe(settings, **choices))


def test_layouts_that_fit_are_validated():
    validate.check(recipe(layout="contiguous", attention_layout="zigzag"))
    validate.check(recipe(layout="auto"))
    validate.check(recipe({"linear_cp_layout": "contiguous", "attention_cp_layout": "zigzag"}))


def test_a_hybrid_models_recipe_is_refused_at_once():
    for name in ("mamba_stack_spec", "hybrid_stack_spec"):
        with pytest.raises(ValueError, match=f"is a hybrid model with the setting {name}"):
            apply_burst(SimpleNamespace(model=SimpleNamespace(**{name: None})))

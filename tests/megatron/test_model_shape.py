"""The layers of a model, by each way in which a configuration states them; counted by hand."""

from types import SimpleNamespace

import pytest

from megatron_burst.megatron.model_shape import ModelShape, layers_without_further_heads


def shape(**settings):
    return ModelShape.of(SimpleNamespace(**settings))


@pytest.mark.parametrize(
    ("settings", "letters"),
    [
        ({"num_layers": 3}, "sss"),
        ({"num_layers": 4, "experimental_attention_variant": "dsa"}, "dddd"),
        ({"num_layers": 4, "experimental_attention_variant": "gdn", "linear_attention_freq": 4},
         "gggs"),
        ({"num_layers": 4, "experimental_attention_variant": "gated_delta_net",
          "linear_attention_freq": [0, 1]}, "sgss"),
        ({"num_layers": 2, "experimental_attention_variant": "gdn2"}, "ss"),
        ({"num_layers": 4, "linear_attention_freq": 4}, "ssss"),
        ({"num_layers": 4, "kimi_kda_layers": [1, 2, 4]}, "kksk"),
        ({"num_layers": 2, "hybrid_layer_pattern": "MG-|*D+E/*-"}, "mgnsdsnsn"),
        ({"num_layers": 2, "hybrid_override_pattern": "M*"}, "ms"),
    ],
)  # fmt: skip
def test_the_kind_of_each_layer(settings, letters):
    kinds = {"s": "softmax", "d": "sparse", "g": "delta_net", "m": "mamba", "k": "kda", "n": "none"}
    assert shape(**settings).attention == tuple(kinds[letter] for letter in letters)


@pytest.mark.parametrize(
    ("settings", "linear", "sparse"),
    [
        ({"num_layers": 3}, None, None),
        ({"num_layers": 3, "experimental_attention_variant": "dsa"},
         None, "--experimental-attention-variant dsa"),
        ({"num_layers": 3, "experimental_attention_variant": "gdn"},
         "--experimental-attention-variant gdn", None),
        ({"hybrid_layer_pattern": "M*D"}, *["--hybrid-layer-pattern M*D"] * 2),
        ({"hybrid_layer_pattern": "*-E+"}, None, None),
        ({"hybrid_layer_pattern": "*X"}, "--hybrid-layer-pattern *X", None),
        ({"hybrid_layer_pattern": "*D", "experimental_attention_variant": "dsa"},
         None, "--experimental-attention-variant dsa"),
        ({"is_hybrid_model": True}, "a hybrid model", None),
        ({"num_layers": 2, "kimi_kda_layers": (1,)}, "Kimi K3", None),
    ],
)  # fmt: skip
def test_the_settings_that_ask_for_linear_and_sparse_layers(settings, linear, sparse):
    found = shape(**settings)
    assert (found.linear_setting, found.sparse_setting) == (linear, sparse)


def test_layers_that_a_configuration_does_not_contain():
    assert shape(num_layers=4, is_hybrid_model=True).attention is None
    assert shape(num_layers=4, is_hybrid_model=True).count("softmax") == 0


@pytest.mark.parametrize(
    ("settings", "count"),
    [({"num_layers": 5}, 5), ({"hybrid_layer_pattern": "M*|M-/*-"}, 4), ({}, 0)],
)
def test_further_heads_are_not_counted(settings, count):
    assert layers_without_further_heads(SimpleNamespace(**settings)) == count

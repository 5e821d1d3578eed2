"""Requirements of layers that carry a state over several ranks, and their messages."""

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig
from test_checks import config

import megatron_burst as mb
from megatron_burst.megatron import layout_bytes
from megatron_burst.megatron.checks.config import layer_problems
from megatron_burst.megatron.model_shape import ModelShape
from megatron_burst.megatron.patching import HYBRID_SINCE, core_version

NEW = core_version() >= HYBRID_SINCE
# The layer's name until 0.19, and since.
DELTA_NET = {
    "experimental_attention_variant": "gated_delta_net" if core_version() < (0, 20) else "gdn"
}
HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
new = pytest.mark.skipif(not NEW, reason="states are passed from 0.19 on")


def told(cp=2, linear="auto", layout="zigzag", **changes):
    burst = mb.BurstConfig(kernel="reference", linear=linear, layout=layout)
    changes = {"calculate_per_token_loss": True} | HEADS | changes
    return [str(problem) for problem in layer_problems(config(cp, **changes), burst)]


LAYERS = [DELTA_NET, {"experimental_attention_variant": "gdn2"}, {"is_hybrid_model": True}]


@pytest.mark.parametrize("layers", LAYERS)
def test_states_are_passed_from_0_19_on(layers):
    found = told(**layers)
    if NEW:
        assert not found
    else:
        (words,) = found
        assert "requires Megatron-Core 0.19 or newer, and this is 0." in words
        unsplit = "experimental_attention_variant" in layers and core_version() < (0, 18)
        assert words.endswith("install a newer one" if unsplit else "add --burst-linear megatron")
    assert not told(linear="megatron", **layers)
    assert not told(cp=1, **layers)


@new
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "balanced", "striped"])
def test_every_layout_but_those_that_part_neighbours(layers, layout):
    found = told(layout=layout, **layers)
    if layout == "striped":
        (words,) = found
        assert "with --burst-layout striped: every row's predecessor" in words
        assert words.endswith("add --burst-layout zigzag")
    else:
        assert not found


@pytest.mark.parametrize("layout", ["contiguous", "balanced", "striped"])
def test_megatrons_own_exchange_of_heads_knows_only_zigzag(layout):
    (words,) = told(linear="megatron", layout=layout, **DELTA_NET)
    assert words.startswith(f"--burst-linear megatron with --burst-layout {layout}")


def test_megatrons_own_exchange_needs_heads_for_every_rank():
    (words,) = told(cp=4, linear="megatron", **DELTA_NET)
    assert words.startswith("--linear-num-key-heads 2 is not divisible by --tensor-model-parallel-")
    assert words.endswith("add --burst-linear auto") == NEW


@new
def test_heads_are_shared_by_tensor_parallel_ranks_alone():
    assert not told(cp=16, **DELTA_NET)
    (words,) = told(tensor_model_parallel_size=4, **DELTA_NET)
    assert words == "--linear-num-key-heads 2 is not divisible by --tensor-model-parallel-size 4"


@new
def test_graphs_of_mixers_are_named():
    graphs = {"cuda_graph_impl": "local", "cuda_graph_modules": ["mamba"]}
    (words,) = told(is_hybrid_model=True, **graphs)
    assert "captures Mamba layers" in words
    assert not told(is_hybrid_model=True, linear="megatron", **graphs)


@pytest.mark.parametrize(
    ("pattern", "linear"), [("M*-", True), ("G*E|G*-/*", True), ("*-*E/*", False), ("+D", False)]
)
def test_patterns_say_which_layers_there_are(pattern, linear):
    made = config(is_hybrid_model=True, hybrid_layer_pattern=pattern)
    assert (ModelShape.of(made).linear_setting is not None) == linear


def _configuration(**changes):
    given = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4,
             "linear_attention_freq": 4, "context_parallel_size": 4}  # fmt: skip
    return TransformerConfig(**given | DELTA_NET | HEADS | changes)


@new
def test_a_configuration_may_have_fewer_heads_than_ranks_once_installed():
    import megatron_burst.megatron as burst

    for installed in (False, True):
        if installed:
            burst.install("zigzag")
        try:
            assert _configuration(context_parallel_size=2).linear_num_key_heads == 2
            with pytest.raises(AssertionError, match="must be a multiple of"):
                _configuration(tensor_model_parallel_size=4)  # by tensor-parallel ranks, always
            if not installed:
                with pytest.raises(AssertionError, match="must be a multiple of"):
                    _configuration()
                continue
            made = _configuration()
            assert (made.linear_num_key_heads, made.linear_num_value_heads) == (2, 4)
            with pytest.raises(AssertionError, match=r"value_heads \(3\) must be .* \(2\)"):
                _configuration(linear_num_value_heads=3)
        finally:
            burst.uninstall()
    with pytest.raises(AssertionError, match="must be a multiple of"):
        _configuration()


@new
def test_a_layer_of_megatrons_own_refuses_heads_that_its_ranks_cannot_share():
    from megatron_burst.megatron.linear.delta_net import check_shared_heads

    check_shared_heads(config(**HEADS), 1, 2)
    with pytest.raises(ValueError, match=r"linear_num_key_heads is 2.*\(1\) x --context.*\(4\)"):
        check_shared_heads(config(**HEADS), 1, 4)


def of_kimi(**choices):
    """Return a configuration with Bridge's fields, and its problems."""
    settings = config(2, calculate_per_token_loss=True, num_layers=4)
    vars(settings).update(
        kimi_kda_layers=(1, 2, 4), kimi_linear_num_heads=4, kimi_linear_head_dim=8,
        kimi_linear_conv_kernel_size=4,
    )  # fmt: skip
    burst = mb.BurstConfig(kernel="reference", **{"layout": "zigzag"} | choices)
    return settings, [str(problem) for problem in layer_problems(settings, burst)]


@new
def test_kimi_k3_is_known_by_what_bridge_adds_to_its_configuration():
    assert not of_kimi()[1]
    (words,) = of_kimi(layout="striped")[1]
    assert words.startswith("Kimi K3 with --burst-layout striped: every row's predecessor")
    (words,) = of_kimi(linear="megatron")[1]
    assert words.startswith(
        "--burst-linear megatron: Megatron's own layers of Kimi K3 support only one"
    )
    assert words.endswith("add --burst-linear auto")


@new
def test_states_of_kimi_k3_count_where_the_layout_is_chosen():
    settings, _ = of_kimi()
    layers = layout_bytes.layers_of(settings)
    assert layers == (3, 0, 1)
    # 4 heads with states of 8 x 8, and 3 rows of q, k and v, in fp32, once along two ranks.
    each = 4 * (4 * 8 * 8 + 3 * 3 * 4 * 8)
    assert layout_bytes.traffic(settings, layers, "contiguous", "contiguous", 64) == (3 * each, 0)

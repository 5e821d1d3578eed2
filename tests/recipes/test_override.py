"""The changes of `apply_burst` to Bridge's recipe, and the check after all overrides."""

import copy
import functools

import pytest
from shrunk import PRETRAIN


@pytest.fixture(scope="module")
def llama(bridge_here):
    """Return a function that returns a fresh copy of Bridge's recipe for 64K tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "32")  # of the recipe: TP 4 x PP 2 x CP 4

        from megatron.bridge.recipes.llama.llama3 import llama3_8b_64k_pretrain_config

        from megatron_burst.megatron import patching

        recipe = llama3_8b_64k_pretrain_config()
        yield lambda: copy.deepcopy(recipe)
        patching.remove("recipes")


def overridden(recipe, *overrides):
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    return process_config_with_overrides(recipe, cli_overrides=list(overrides))


def test_only_the_layer_spec_changes_without_choices(llama):
    from megatron.bridge.training.utils.omegaconf_utils import create_omegaconf_dict_config

    from megatron_burst.recipes import apply_burst, burst_layer_spec

    before, recipe = llama(), llama()
    default = before.model.transformer_layer_spec
    assert apply_burst(recipe) is recipe
    spec = recipe.model.transformer_layer_spec
    assert isinstance(spec, functools.partial)
    assert (spec.func, spec.keywords) == (burst_layer_spec, {"base": default})
    plain = [create_omegaconf_dict_config(one)[0] for one in (before, recipe)]
    assert plain[0] == plain[1]  # everything else, as Bridge itself reads it


def test_a_choice_changes_what_it_cannot_live_with(llama, capfd):
    from megatron_burst.recipes import apply_burst

    recipe = apply_burst(llama(), lm_head_loss="single_pass", store=0.5)
    model = recipe.model
    assert model.cross_entropy_loss_fusion is False
    assert (model.recompute_granularity, model.recompute_num_layers) == ("full", 1)
    assert "now has cross_entropy_loss_fusion=False, recompute_granularity=full" in (
        capfd.readouterr().out
    )
    recipe = llama()
    recipe.model.recompute_granularity = "selective"
    recipe.model.recompute_modules = ["core_attn"]
    apply_burst(recipe, store=0.5)
    assert recipe.model.recompute_granularity == "selective"  # the recipe recomputes as it is
    assert capfd.readouterr().out == ""


def test_a_second_call_replaces_the_first(llama):
    from megatron_burst.recipes import apply_burst

    recipe = apply_burst(llama(), intra=2, side="kv")
    default = recipe.model.transformer_layer_spec.keywords["base"]
    apply_burst(recipe, layout="striped")
    keywords = recipe.model.transformer_layer_spec.keywords
    assert keywords == {"base": default, "layout": "striped"}


def test_a_second_call_puts_back_what_the_first_changed(llama):
    from megatron_burst.recipes import apply_burst

    names = ("cross_entropy_loss_fusion", "recompute_granularity", "recompute_num_layers")
    stock = [getattr(llama().model, name) for name in names]
    recipe = apply_burst(llama(), lm_head_loss="single_pass", store=0.5)
    assert [getattr(recipe.model, name) for name in names] != stock
    apply_burst(recipe, algorithm="megatron")
    assert [getattr(recipe.model, name) for name in names] == stock
    apply_burst(recipe, store=0.5)
    recipe.model.recompute_num_layers = 4  # the user's
    apply_burst(recipe, lm_head_loss="single_pass")
    model = recipe.model
    assert (model.recompute_granularity, model.recompute_num_layers) == (None, 4)
    assert model.cross_entropy_loss_fusion is False


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"intra_size": 2}, "intra_size is not an argument of apply_burst; use intra, algorithm"),
        ({"stores": 0.5}, "stores is not an argument of apply_burst; use intra, algorithm"),
        ({"store": 1.5}, "store .* must be a fraction from 0 to 1, got 1.5"),
        ({"layout": "diagonal"}, "layout .* must be one of"),
        ({"intra": "2"}, r"intra_size \(intra\) must be an integer"),
    ],
)
def test_unknown_choices_are_named_at_once(llama, choices, message):
    from megatron_burst.recipes import apply_burst

    with pytest.raises(ValueError, match=message):
        apply_burst(llama(), **choices)


@pytest.mark.parametrize("recipe", [None, {"model": 1}, "llama3_8b_64k_pretrain_config"])
def test_what_is_no_recipe_is_named(recipe):
    from megatron_burst.recipes import apply_burst

    with pytest.raises(
        ValueError, match=r"recipe must be a ConfigContainer .*; got (None|dict|str)"
    ):
        apply_burst(recipe)


def test_hybrid_models_are_refused(llama):
    from megatron.bridge.models.mamba.mamba_provider import MambaModelProvider

    from megatron_burst.recipes import apply_burst

    recipe = llama()
    recipe.model = MambaModelProvider(num_layers=2, hidden_size=64, num_attention_heads=4)
    with pytest.raises(ValueError, match=r"^recipe: MambaModelProvider is a hybrid model with"):
        apply_burst(recipe)


def test_models_of_images_are_refused(llama):
    from megatron.bridge.models.glm_vl import GLM45VModelProvider
    from megatron.bridge.models.ministral3 import Ministral3ModelProvider3B

    from megatron_burst.recipes import apply_burst

    for provider in (Ministral3ModelProvider3B, GLM45VModelProvider):
        recipe = llama()
        recipe.model = provider(num_layers=2, hidden_size=64, num_attention_heads=4)
        with pytest.raises(ValueError, match=f"{provider.__name__} is a vision-language model"):
            apply_burst(recipe)


def own_attention(config):
    """Return layers with a core attention that is not Megatron's."""
    from megatron.bridge.models.gpt_provider import local_layer_spec
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    layers = copy.deepcopy(local_layer_spec(config))
    kind = type("Theirs", (DotProductAttention,), {"forward": None})
    layers.submodules.self_attention.submodules.core_attention = kind
    return layers


def no_attention(config):
    """Return layers that hide their attention, like Transformer Engine's full layers."""
    from megatron.core.transformer import ModuleSpec

    return ModuleSpec(module=type("Whole", (), {}))


def built(model):
    from megatron.core.transformer.attention import SelfAttention

    spec = model.transformer_layer_spec(model)
    SelfAttention(model, spec.submodules.self_attention.submodules, layer_number=1)


def test_layers_without_an_attention_to_replace_are_refused(llama):
    """The first is refused in its attention layer's constructor, the second before."""
    from megatron_burst.megatron import uninstall
    from megatron_burst.plugins.testing import recipes as cpu
    from megatron_burst.recipes import apply_burst

    for layers, message in (
        (own_attention, r"core attention \S*\.Theirs: Theirs overrides forward"),
        (
            no_attention,
            "no Megatron attention that BurstAttention can replace, only Whole.* megatron",
        ),
    ):
        recipe = llama()
        cpu.adapt(recipe)
        recipe.model.transformer_layer_spec = layers
        apply_burst(recipe)
        recipe.validate()
        try:
            with pytest.raises(ValueError, match=message):
                built(recipe.model)
        finally:
            uninstall()


def test_a_recipe_without_us_is_not_cut_by_the_layout_of_another(llama):
    from megatron_burst.megatron import install, uninstall
    from megatron_burst.plugins.testing import recipes as cpu
    from megatron_burst.recipes import apply_burst

    stranger = llama()
    cpu.adapt(stranger)
    apply_burst(llama())  # from now on Bridge's validation asks us
    install("striped")
    try:
        with pytest.raises(ValueError, match=r"installed layout striped.*uninstall\(\)"):
            stranger.validate()
    finally:
        uninstall()
    stranger.validate()


@pytest.mark.parametrize(
    ("choices", "overrides", "message"),
    [
        ({}, ["model.hierarchical_context_parallel_sizes=[2,3]"],
         r"^model.hierarchical_context_parallel_sizes \[2, 3\] has the product 6, but "
         "model.context_parallel_size is 4"),
        ({"intra": 3}, [], "^intra 3 does not divide model.context_parallel_size 4"),
        ({}, ["model.seq_length=65540", "dataset.sequence_length=65540"],
         "^model.seq_length 65540 is not divisible by 2 x model.context_parallel_size"),
        ({}, ["model.attention_backend=local"], "^model.attention_backend local selects"),
        ({}, ["model.attention_dropout=0.1"], "add model.attention_dropout 0"),
        ({}, ["dist.use_decentralized_pg=true"], "^dist.use_decentralized_pg=True: "),
        ({}, ["model.experimental_attention_variant=gated_delta_net"],
         "^model.experimental_attention_variant gated_delta_net at model.context_parallel_size 4: "
         "passing states .* requires Megatron-Core 0.19 .* cannot split these layers"),
        ({"layout": "striped", "attention_layout": "zigzag"}, [],
         "^attention_layout zigzag does not work with layout striped: .* add layout contiguous"),
        ({"lm_head_loss": "single_pass"}, ["model.cross_entropy_loss_fusion=true"],
         "^lm_head_loss single_pass .* remove model.cross_entropy_loss_fusion"),
        ({"store": 0.5}, ["model.recompute_granularity=null"],
         "^store 0.5 .* add model.recompute_granularity full"),
        ({"algorithm": "hybrid"}, [], "^algorithm hybrid requires ulysses_size"),
        ({"store": 0.5}, ["model.recompute_granularity=selective", "model.recompute_modules=[mlp]"],
         r"^store 0.5 .* model.recompute_modules \['mlp'\] does not recompute attention"),
        ({}, ["model.window_size=128"], "^model.window_size 128 is one number"),
        ({}, ["model.hierarchical_context_parallel_sizes=4"],
         "^model.hierarchical_context_parallel_sizes is 4; it must be two sizes"),
        ({}, ["model.context_parallel_size=null"],
         "^model.context_parallel_size is None; it must be an integer"),
    ],
)  # fmt: skip
def test_bridges_own_validation_names_what_does_not_fit(llama, choices, overrides, message):
    from megatron_burst.recipes import apply_burst

    recipe = overridden(apply_burst(llama(), **choices), *overrides)
    with pytest.raises(ValueError, match=message):
        recipe.validate()


def test_all_that_does_not_fit_is_told_at_once(llama):
    from megatron_burst.recipes import apply_burst

    recipe = overridden(
        apply_burst(llama(), store=0.5, lm_head_loss="single_pass"),
        "model.attention_backend=local", "model.attention_dropout=0.1",
        "dist.use_decentralized_pg=true", "model.recompute_granularity=null",
        "model.cross_entropy_loss_fusion=true",
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"^5 settings are not supported:") as raised:
        recipe.validate()
    _, *lines = str(raised.value).splitlines()
    reasons, fixes = [one[4:] for one in lines[:5]], [one.split() for one in lines[5:]]
    for reason in (
        "model.attention_backend local selects", "attention dropout is 0.1",
        "dist.use_decentralized_pg=True: ", "store 0.5 keeps attention",
        "lm_head_loss single_pass replaces",
    ):  # fmt: skip
        assert sum(one.startswith(reason) for one in reasons) == 1, reason
    assert fixes == [
        ["add:", "model.attention_dropout", "0"], ["remove:", "model.cross_entropy_loss_fusion"],
    ]  # fmt: skip


def test_what_fits_is_validated(llama):
    from megatron_burst.plugins.testing import recipes as cpu
    from megatron_burst.recipes import apply_burst

    ours, theirs = llama(), llama()
    for recipe in (ours, theirs):
        cpu.adapt(recipe)  # or Bridge refuses fused kernels that are not installed
    sizes = ["model.hierarchical_context_parallel_sizes=[2,2]"]
    sizes += ["model.recompute_granularity=selective", "model.recompute_modules=null"]
    sizes += ["model.recompute_method=null", "model.recompute_num_layers=null"]
    overridden(apply_burst(ours, store=0.5), *sizes).validate()
    overridden(theirs, "model.attention_backend=local").validate()  # not ours to check


def test_the_line_of_the_readme_fits(llama, monkeypatch):
    from megatron.bridge.recipes.llama import llama3_8b_128k_pretrain_config

    from megatron_burst.plugins.testing import recipes as cpu
    from megatron_burst.recipes import apply_burst

    cfg = apply_burst(
        llama3_8b_128k_pretrain_config(), intra=2, lm_head_loss="single_pass", store=0.5
    )
    monkeypatch.setenv("WORLD_SIZE", "64")  # TP 4 x PP 2 x CP 8
    cpu.adapt(cfg)
    cfg.validate()
    assert cfg.model.recompute_granularity == "full"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "nonsense",
            "NAME nonsense is unknown: use a ready-made recipe (llama3_8b_pretrain_8gpu_",
        ),
        ("llama3_8b_64k_pretrain_config +model.x=1", "override +model.x=1: write setting=value"),
        ("llama3_8b_64k_pretrain_config model.xyz=1", "Could not override 'model.xyz'"),
        (
            "llama3_8b_64k_pretrain_config burst.foo=1",
            "foo is not an argument of apply_burst; use intra, algorithm",
        ),
        ("llama3_8b_64k_pretrain_config burst.intra=3", "intra 3 does not divide model.context_"),
        ("llama3_8b_64k_pretrain_config --prnt", "--prnt is not an option"),
        ("llama3_8b_64k_pretrain_config burst.layout", "burst.layout: write burst.layout=value"),
        ("", "NAME is missing"),
    ],
)
def test_the_launcher_ends_in_one_line(recipe, words, message):
    code, text = recipe(words)
    assert code == 2, text
    assert message in text.splitlines()[-1]


def test_the_launcher_shows_without_training(recipe):
    words = f"llama2_7b_pretrain_32gpu_a800_2m --print {' '.join(PRETRAIN)} burst.kernel=reference"
    code, text = recipe(words)
    assert code == 0, text[-2000:]
    for line in ("_target_: megatron_burst.recipes.layers.burst_layer_spec", "side: query",
                 "kernel: reference", "store: 0.5", "context_parallel_size: 16"):  # fmt: skip
        assert line in text
    code, text = recipe("--list")
    assert code == 0
    assert "llama2_7b_pretrain_32gpu_a800_2m" in text

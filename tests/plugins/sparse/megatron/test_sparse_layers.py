"""`mb.sparse_layer_spec`: training is the same at all parallel sizes."""

from pathlib import Path
from types import SimpleNamespace

import documented
import pytest
import sparse_layers
from documented import ROOT
from ranks import Ranks
from sparse_layers import RULES

import megatron_burst as mb
from megatron_burst.plugins.sparse import rules
from megatron_burst.plugins.sparse.megatron import layers

CP2, CP4 = {"context_parallel_size": 2}, {"context_parallel_size": 4}
TP2 = CP2 | {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = CP2 | {"pipeline_model_parallel_size": 2}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective"}
PER_TOKEN = {"calculate_per_token_loss": True}
CASES = {  # rule, settings of Megatron, of BurstConfig
    "moba cp2": ("moba", CP2, {}),
    "moba cp4": ("moba", CP4, {"algorithm": "multicast"}),
    "qsa cp2": ("qsa", CP2 | SELECTIVE, {}),
    "qsa cp4": ("qsa", CP4, {}),
    "qsa tp2": ("qsa", TP2, {}),
    "msa cp4": ("msa", CP4, {}),
    "msa tp2": ("msa", TP2 | FULL, {}),
    "dsa pp2": ("dsa", PP2, {"layout": "striped"}),
    "qsa cp2 stored": ("qsa", CP2 | FULL, {"store": 1.0}),
    "apart": ("qsa", CP4, {"layout": "contiguous", "attention_layout": "zigzag"}),
}
# A second step shows that nothing remains of the first.
TWO_STEPS = ("moba cp2", "qsa cp2 stored", "dsa pp2")


def compare(actual, expected, tolerance):
    for (loss, of_indexers, gradients), (want, reference, stock) in zip(
        actual, expected, strict=True
    ):
        assert loss == pytest.approx(want, rel=1e-6)
        assert of_indexers == pytest.approx(reference, rel=1e-5)  # the tracker is in float32
        for name, gradient in gradients.items():
            assert (gradient - stock[name]).abs().max() < tolerance, name


@pytest.fixture(scope="module")
def alone(four):
    cached = {}

    def run(rule):
        if rule not in cached:
            cached[rule] = four(sparse_layers.train, {}, RULES[rule])[0]
        return cached[rule]

    return run


@pytest.mark.parametrize("case", CASES)
def test_trains_alike_at_any_size(four, alone, case):
    rule, changes, burst = CASES[case]
    steps = 1 + (case in TWO_STEPS)
    expected = alone(rule)[:steps]
    assert all((index > 0) == (rule != "moba") for _, index, _ in expected)
    # Of a vocabulary over tensor-parallel ranks Megatron sums cross entropy in float32.
    for actual in four(sparse_layers.train, changes, RULES[rule], burst, False, steps):
        compare(actual, expected, 1e-7 if "tp2" in case else 1e-12)


@pytest.mark.slow
def test_trains_alike_on_packed_documents(four):
    for rule in ("moba", "qsa"):
        expected = four(sparse_layers.train, {}, RULES[rule], {}, True, 1)[0]
        for actual in four(sparse_layers.train, CP4, RULES[rule], {}, True, 1):
            compare(actual, expected, 1e-12)


def test_a_loss_per_token_weighs_the_indexers_alike(four, alone):
    for actual in four(sparse_layers.train, CP4 | PER_TOKEN, RULES["qsa"], {}, False, 1):
        compare(actual, alone("qsa")[:1], 1e-12)


@pytest.mark.parametrize("rule", ["moba", "qsa"])
def test_equal_to_dense_matrices(four, rule):
    for errors, trained in four(sparse_layers.against_dense, rule):
        assert max(errors.values()) < 1e-12
        assert trained == (0 if rule == "moba" else 4)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["msa", "hybrid"])
def test_a_checkpoint_goes_on_at_other_sizes(tmp_path, rule):
    """A checkpoint saved at CP 2 and TP 2 is loaded at CP 4."""
    server = Ranks(tmp_path, ["pretrain_gpt"], ROOT / "examples")
    (tmp_path / "model").mkdir()
    script = Path(__file__).with_name("sparse_checkpoint.py")
    done = server.run(4, [str(tmp_path / "model"), rule], script=script)
    server.close()
    assert done.codes == [0] * 4, "\n".join(done.texts)[-4000:]
    assert [text.split()[-1] for text in done.texts] == ["0.0"] * 4


def test_names_in_checkpoints(four):
    """docs/sparse.md lists the names."""
    prefix, shapes = "decoder.layers.0.self_attention.indexer.", {
        "linear_q.weight": (24, 32), "linear_k.weight": (8, 32), "k_norm.weight": (8,),
    }  # fmt: skip
    extra = {
        "qsa": {"q_norm.weight": (8,)},
        "dsa": {"k_norm.bias": (8,), "linear_weights.weight": (3, 32)},
        "moba": {},
    }
    for rule, others in extra.items():
        expected = {} if rule == "moba" else shapes | others
        for found in four(sparse_layers.names, {"tensor_model_parallel_size": 2}, RULES[rule]):
            assert all(shape[0] == 2 for shape in found.values())  # Megatron stacks layers
            first = {n.removeprefix(prefix): s[1:] for n, s in found.items() if prefix in n}
            assert first == expected


WRONG = {  # words of the error -> arguments
    "rule must be one of dsa, qsa, moba, msa": {"rule": "best"},
    "top_k must be an integer >= 1, got 0": {"top_k": 0},
    "block must be an integer >= 1, got '4'": {"block": "4"},
    "index_heads must be at least 1 for rule Qsa": {"rule": "qsa", "index_heads": 0},
    "index_heads is 0, so rule Moba runs without an indexer": {"loss_coeff": 0.1},
    "index_width is required for the indexer of rule Moba": {"index_heads": 2},
    "loss_coeff must be a number >= 0, got -1": {"rule": "msa", "loss_coeff": -1},
    "base must be the spec of a transformer layer": {"base": "local"},
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_arguments_are_refused(words):
    with pytest.raises(ValueError, match=words.split(",")[0]):
        mb.sparse_layer_spec(**{"rule": "moba", "top_k": 2} | WRONG[words])


REFUSED = {  # words -> settings of Megatron, layers, BurstConfig, only a step shows it
    "--context-parallel-algo burst": (CP2, "moba", {"algorithm": "megatron"}, False),
    "--attention-dropout 0": ({"attention_dropout": 0.1}, "moba", {}, False),
    "ranks cannot share": (CP2, "moba", {"algorithm": "ulysses"}, False),
    "must equal --num-query-groups 2": (CP2, {"index_heads": 4}, {}, False),
    "do not support a window": ({"window_size": (3, 0)}, "moba", {}, False),
    "does not support attention with a sink": ({"softmax_type": "learnable"}, "qsa", {}, False),
    "blocks of 128 positions": (CP2, {"block": 128}, {}, True),
    "layout striped cuts the blocks": (CP2, "qsa", {"layout": "striped"}, True),
    "require the keys of a block on one rank": (
        CP2, "qsa", {"layout": "zigzag", "attention_layout": "contiguous"}, False,
    ),
    "index_width 4 is narrower than the 8 columns": (CP2, {"index_width": 4}, {}, True),
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_served_is_refused_on_every_rank(four, words):
    changes, layers, burst, step = REFUSED[words]
    layers = RULES["msa"] | layers if isinstance(layers, dict) else RULES[layers]
    for found in four(sparse_layers.message, changes, layers, burst, step):
        assert words in (found or "")


def test_a_norm_inside_a_linear_layer_comes_out(monkeypatch):
    """The modules are stand-ins for Transformer Engine's."""
    from megatron.core.extensions import transformer_engine
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.identity_op import IdentityOp

    kinds = [type(name, (), {}) for name in ("Fused", "Linear", "Norm")]
    names = "TELayerNormColumnParallelLinear", "TEColumnParallelLinear", "TENorm"
    for name, kind in zip(names, kinds, strict=True):
        monkeypatch.setattr(transformer_engine, name, kind, raising=False)
    base = get_gpt_layer_local_spec()
    parts = base.submodules
    parts.input_layernorm, parts.sharded_state_dict_keys_map = IdentityOp, {}
    parts.self_attention.submodules.linear_qkv = kinds[0]
    made = mb.sparse_layer_spec(rule="qsa", top_k=2, base=base).submodules
    assert made.self_attention.submodules.linear_qkv is kinds[1]
    assert made.input_layernorm is kinds[2]
    assert made.sharded_state_dict_keys_map == {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_"
    }
    kept = mb.sparse_layer_spec(rule="moba", top_k=2, base=base).submodules
    assert kept.self_attention.submodules.linear_qkv is kinds[0]
    parts.self_attention.submodules.linear_qkv = kinds[2]
    with pytest.raises(ValueError, match="must have an input_layernorm"):
        mb.sparse_layer_spec(rule="qsa", top_k=2, base=base)


def test_only_attention_layers_of_a_block_change():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    layers = [get_gpt_layer_local_spec(), get_gpt_layer_local_spec(multi_latent_attention=True)]
    block = TransformerBlockSubmodules(layer_specs=layers)
    made = mb.sparse_layer_spec(rule=rules.Moba(block=8), top_k=2, base=block).layer_specs
    assert made[0].submodules.self_attention.params["choice"].rule.block == 8
    assert made[1] is layers[1]
    assert layers[0].submodules.self_attention.params.keys() == {"attn_mask_type"}


def test_the_block_of_the_documentation(four):
    *_, block = documented.blocks("docs/sparse.md")
    assert four(sparse_layers.documented, block.text) == [["Qsa"] * 2] * 4


@pytest.mark.parametrize(("given", "found"), [(None, 0.01), (0.0, 0.0), (0.5, 0.5)])
def test_megatrons_coefficient_counts_where_the_spec_has_none(given, found):
    """A coefficient of 0 disables the loss."""
    layer = mb.sparse_layer_spec(rule="qsa", top_k=2).submodules.self_attention
    config = SimpleNamespace(dsa_indexer_loss_coeff=given)
    assert layers._coefficient(config, layer.params["choice"]) == found


def test_ranks_without_an_indexer_track_its_loss_too(four):
    """Otherwise ranks with an indexer would wait while Megatron sums over pipeline stages."""
    assert four(sparse_layers.layers_tracked) == [2] * 4

"""Flags that have no effect in a subclass of `TransformerLayer` are refused when it is built."""

from types import SimpleNamespace

import pytest
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayer

import megatron_burst as mb
from megatron_burst.plugins.longseq.layer.own_forward import own_forward_problems

PLAIN = SimpleNamespace(recompute_granularity=None)
ALL = mb.BurstConfig(layout="zigzag", sequence_chunks=2, mlp_tiles=2, offload=0.5)
CHUNKS, TILES, OFFLOAD = "--burst-sequence-chunks 2", "--burst-mlp-tiles 2", "--burst-offload 0.5"


class Constructor(TransformerLayer):
    def __init__(self, *args, **named):
        super().__init__(*args, **named)


class OwnExperts(MoETransformerLayer):
    def _forward_mlp(self, hidden_states, *args, **named):
        return self.mlp(hidden_states)[0]


class AddsAfter(TransformerLayer):
    """A layer that runs all inherited methods but is not in the table."""

    def forward(self, *args, **named):
        hidden, context = super().forward(*args, **named)
        return hidden + 1, context


class OwnMlp(TransformerLayer):
    def _forward_mlp(self, hidden_states, *args, **named):
        return self.mlp(hidden_states)[0]


class OwnMlpFurther(OwnMlp):
    """A subclass whose constructor changes nothing of the inherited override."""

    def __init__(self, *args, **named):
        super().__init__(*args, **named)


class OwnForward(TransformerLayer):
    def forward(self, hidden_states, **named):
        return self.self_attention(hidden_states)[0], None


@pytest.mark.parametrize(
    ("layer", "overrides"),
    [
        (TransformerLayer, {}),
        (MoETransformerLayer, {}),
        (MLPLayer, {}),
        (Constructor, {}),
        (OwnMlp, {TILES: "_forward_mlp"}),
        (OwnMlpFurther, {TILES: "_forward_mlp"}),
        (OwnExperts, {TILES: "_forward_mlp"}),
        (AddsAfter, {CHUNKS: "forward", TILES: "forward", OFFLOAD: "forward"}),
        (OwnForward, {CHUNKS: "forward", TILES: "forward", OFFLOAD: "forward"}),
    ],
)
def test_flags_without_effect_are_refused(layer, overrides):
    found = [str(problem) for problem in own_forward_problems(layer, PLAIN, ALL)]
    assert [words.split(":")[0] for words in found] == list(overrides)
    for words, (flag, method) in zip(found, overrides.items(), strict=True):
        assert f"layers are {layer.__name__}, whose {method} (" in words
        assert words.endswith(f"remove {flag.split()[0]}")
    assert not list(own_forward_problems(layer, PLAIN, mb.BurstConfig(layout="zigzag")))


def test_hyper_connections_run_both_parts_but_not_the_inherited_forward():
    """Releases up to 0.19 do not have this class."""
    name, forward = "HyperConnectionTransformerLayer", OwnForward.forward
    members = {"forward": forward, "__module__": TransformerLayer.__module__}
    (found,) = own_forward_problems(type(name, (TransformerLayer,), members), PLAIN, ALL)
    assert str(found).startswith(f"{OFFLOAD}: layers are {name}, whose forward (")


def test_the_layers_of_the_installed_megatron_honour_the_flags():
    """A new class of a later release must be read, and added to the table or refused."""
    home = TransformerLayer.__module__
    classes = [cls for cls in TransformerLayer.__subclasses__() if cls.__module__ == home]
    assert {cls.__name__ for cls in classes} >= {"MoETransformerLayer"}
    refused = {cls.__name__ for cls in classes if list(own_forward_problems(cls, PLAIN, ALL))}
    assert refused <= {"HyperConnectionTransformerLayer"}


def test_full_recomputation_offloads_outside_the_forward():
    whole = SimpleNamespace(recompute_granularity="full")
    found = [str(problem) for problem in own_forward_problems(OwnForward, whole, ALL)]
    assert [words.split(":")[0] for words in found] == [CHUNKS, TILES]

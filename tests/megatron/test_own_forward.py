"""Flags that a model's own class of layers would not honour are refused when it is built."""

from types import SimpleNamespace

import pytest
from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayer

import megatron_burst as mb
from megatron_burst.megatron.layer.own_forward import own_forward_problems

PLAIN = SimpleNamespace(recompute_granularity=None)
ALL = mb.BurstConfig(layout="zigzag", sequence_chunks=2, mlp_tiles=2, offload=0.5)
CHUNKS, TILES, OFFLOAD = "--burst-sequence-chunks 2", "--burst-mlp-tiles 2", "--burst-offload 0.5"


class AddsAfter(TransformerLayer):
    def forward(self, *args, **named):
        hidden, context = super().forward(*args, **named)
        return hidden + 1, context


class AddsInside(AddsAfter):
    def _forward_mlp(self, hidden_states, *args, **named):
        def rest():
            return super(AddsInside, self)._forward_mlp(hidden_states, *args, **named)

        return rest() + 1


class Calls(TransformerLayer):
    """In the order of its own."""

    def forward(self, hidden_states, **named):
        hidden, _ = self._forward_attention(hidden_states, **named)
        return self._forward_mlp(hidden), None


class OwnMlp(TransformerLayer):
    def _forward_mlp(self, hidden_states, *args, **named):
        return self.mlp(hidden_states)[0]


class OwnMlpFurther(OwnMlp):
    """Its forward of the MLP passes on, to one that does not."""

    def _forward_mlp(self, hidden_states, *args, **named):
        return super()._forward_mlp(hidden_states, *args, **named)


class OwnForward(TransformerLayer):
    def forward(self, hidden_states, **named):
        return self.self_attention(hidden_states)[0], None


@pytest.mark.parametrize(
    ("layer", "flags"),
    [
        (TransformerLayer, ()),
        (MoETransformerLayer, ()),
        (AddsAfter, ()),
        (AddsInside, ()),
        (Calls, (OFFLOAD,)),
        (OwnMlp, (TILES,)),
        (OwnMlpFurther, (TILES,)),
        (OwnForward, (CHUNKS, TILES, OFFLOAD)),
    ],
)
def test_what_a_class_would_not_run_is_named(layer, flags):
    found = [str(problem) for problem in own_forward_problems(layer, PLAIN, ALL)]
    assert tuple(words.split(":")[0] for words in found) == flags
    for words, flag in zip(found, flags, strict=True):
        assert f"layers are {layer.__name__}, whose _forward" in words or flag == OFFLOAD
        assert words.endswith(f"remove {flag.split()[0]}")
    assert not list(own_forward_problems(layer, PLAIN, mb.BurstConfig(layout="zigzag")))


def test_what_is_recomputed_whole_goes_to_the_host_around_a_forward():
    whole = SimpleNamespace(recompute_granularity="full")
    found = [str(problem) for problem in own_forward_problems(OwnForward, whole, ALL)]
    assert [words.split(":")[0] for words in found] == [CHUNKS, TILES]

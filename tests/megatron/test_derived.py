"""Core attentions that derive from Megatron's: which BurstAttention takes the place of, and what it
is built from. `tests/recipes` and `tests/verl` train with those of Megatron-Bridge."""

import copy
from types import SimpleNamespace

import pytest
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from megatron_burst.megatron.attention.derived import stands_for

STOCK = (DotProductAttention,)


class Windowed(DotProductAttention):
    """In every layer but the first, as Bridge's models do it."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, **named):
        config = copy.copy(config)
        config.window_size = (3, 0) if layer_number > 1 else None
        super().__init__(
            config=config, layer_number=layer_number, attn_mask_type=attn_mask_type,
            attention_type=attention_type, **named,
        )  # fmt: skip


class Further(Windowed):
    """One more constructor that changes nothing."""

    def __init__(self, config, *args, **named):
        super().__init__(config, *args, **named)


class Capped(Windowed):
    def forward(self, *args, **named):
        return super().forward(*args, **named).clamp(-1, 1)


class Called(Windowed):
    def __call__(self, query, *others, **named):
        return super().__call__(3 * query, *others, **named)


class Sharp(DotProductAttention):
    def __init__(self, config, *args, **named):
        super().__init__(config, *args, **named)
        self.softmax_scale = 3.0


class MiMoV2FlashTEDotProductAttention(DotProductAttention):
    def __init__(self, config, *args, **named):
        self._attention_value_scale = 0.7
        super().__init__(config, *args, **named)

    def forward(self, query, key, value, *args, **named):
        return super().forward(query, key, value * self._attention_value_scale, *args, **named)


def built(cls, number, **named):
    return cls._built(SimpleNamespace(), number, "causal", "self", softmax_scale=0.5, **named)


@pytest.mark.parametrize("theirs", [Windowed, Further])
def test_it_is_built_from_what_megatrons_class_would_get(theirs):
    ours = stands_for(theirs, STOCK)
    assert ours.__name__ == f"Burst{theirs.__name__}"
    before = DotProductAttention.__init__
    for number, window in ((1, None), (2, (3, 0))):
        handed, kept = built(ours, number)
        assert handed.pop("config").window_size == window
        assert handed == {
            "layer_number": number, "attn_mask_type": "causal", "attention_type": "self",
            "softmax_scale": 0.5,
        }  # fmt: skip
        assert kept == {}
    assert DotProductAttention.__init__ is before


def test_a_known_scale_of_values_is_kept():
    ours = stands_for(MiMoV2FlashTEDotProductAttention, STOCK)
    assert ours.scale == "_attention_value_scale"
    assert built(ours, 1)[1] == {"_attention_value_scale": 0.7}


@pytest.mark.parametrize("theirs", [Capped, Called, int, "a mock", None])
def test_what_computes_something_else_is_not_replaced(theirs):
    assert stands_for(theirs, STOCK) is None


class Touched(DotProductAttention):
    def __init__(self, config, *args, **named):
        super().__init__(config, *args, **named)
        self.softmax_scale *= 3.0


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (Sharp, "^Sharp sets softmax_scale of Megatron's attention"),
        (Touched, "^Touched uses the attention that its constructor makes"),
    ],
)
def test_what_a_constructor_does_besides_is_refused(theirs, message):
    with pytest.raises(ValueError, match=message):
        built(stands_for(theirs, STOCK), 1)


def test_a_scale_that_is_read_beside_other_things_is_not_known():
    class MiMoV2FlashTEDotProductAttention(DotProductAttention):
        def forward(self, query, key, value, *args, **named):
            value = value * self._attention_value_scale + self.shift
            return super().forward(query, key, value, *args, **named)

    assert stands_for(MiMoV2FlashTEDotProductAttention, STOCK) is None


class Blind(DotProductAttention):
    def __init__(self, config, layer_number, attn_mask_type, attention_type, **named):
        super().__init__(config, layer_number, AttnMaskType.no_mask, attention_type, **named)


def test_another_kind_of_mask_is_refused():
    with pytest.raises(ValueError, match=r"^Blind changes the kind of mask .* to AttnMaskType.no"):
        stands_for(Blind, STOCK)(
            SimpleNamespace(), layer_number=1, attn_mask_type=AttnMaskType.causal,
            attention_type="self",
        )  # fmt: skip

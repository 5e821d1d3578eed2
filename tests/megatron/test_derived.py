"""Core attentions that derive from Megatron's: which classes BurstAttention replaces, and how.

`tests/recipes` and `tests/plugins/rl/verl` train with the classes of Megatron-Bridge.
"""

import copy
from types import SimpleNamespace

import pytest
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from megatron_burst.megatron.attention.derived import replacement_class

STOCK = (DotProductAttention,)


class Windowed(DotProductAttention):
    """A class with a window in every layer except the first, as in Bridge's models."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, **named):
        config = copy.copy(config)
        config.window_size = (3, 0) if layer_number > 1 else None
        super().__init__(
            config=config, layer_number=layer_number, attn_mask_type=attn_mask_type,
            attention_type=attention_type, **named,
        )  # fmt: skip


class Further(Windowed):
    """A class with one more constructor that changes nothing."""

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


class ScaledValues(DotProductAttention):
    def __init__(self, config, *args, **named):
        self._attention_value_scale = 0.7
        DotProductAttention.__init__(self, config, *args, **named)

    def forward(self, query, key, value, *args, **named):
        value = value * self._attention_value_scale
        return DotProductAttention.forward(self, query, key, value, *args, **named)


def built(cls, number, **named):
    return cls._built(SimpleNamespace(), number, "causal", "self", softmax_scale=0.5, **named)


@pytest.mark.parametrize("theirs", [Windowed, Further])
def test_it_is_built_from_what_megatrons_class_would_get(theirs):
    ours = replacement_class(theirs, STOCK)
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


class MoreScaledValues(ScaledValues):
    """A class with only one more constructor, like Bridge's class for multi-token prediction."""

    def __init__(self, config, *args, **named):
        super().__init__(config, *args, **named)


def at_path(module, name):
    """Return a class with the members of `ScaledValues` and this module and name."""
    methods = {key: vars(ScaledValues)[key] for key in ("__init__", "forward")}
    return type(name, (DotProductAttention,), {**methods, "__module__": module})


BRIDGE = "megatron.bridge.models.mimo_v2_flash.modeling_mimo_v2_flash"


def test_a_known_scale_of_values_is_kept():
    known = at_path(BRIDGE, "MiMoV2FlashTEDotProductAttention")
    derived = type("MiMoV2FlashMTPTEDotProductAttention", (known,), {"__init__": known.__init__})
    for theirs in (known, derived):
        ours = replacement_class(theirs, STOCK)
        assert ours.scale == "_attention_value_scale"
        assert built(ours, 1)[1] == {"_attention_value_scale": 0.7}


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (Capped, r"core attention \S*test_derived.Capped: Capped overrides forward, which "),
        (Called, r"core attention \S*test_derived.Called: Called overrides __call__, which "),
        (MoreScaledValues, r"core attention \S*MoreScaledValues, which inherits from "
         r"\S*test_derived.ScaledValues: ScaledValues overrides forward"),
    ],
)  # fmt: skip
def test_an_unknown_override_is_refused(theirs, message):
    with pytest.raises(ValueError, match=message) as refusal:
        replacement_class(theirs, STOCK)
    hint = "Use DotProductAttention in the spec, or a class that overrides only __init__, or "
    assert str(refusal.value).endswith(f"{hint}--context-parallel-algo megatron")


@pytest.mark.parametrize(
    ("module", "name"),
    [(BRIDGE, "Other"), ("other", "MiMoV2FlashTEDotProductAttention")],
)
def test_the_known_class_is_found_by_module_and_name(module, name):
    with pytest.raises(ValueError, match=f"{module}.{name}: {name} overrides forward"):
        replacement_class(at_path(module, name), STOCK)


@pytest.mark.parametrize("theirs", [int, "a mock", None])
def test_what_derives_from_no_core_attention_is_not_replaced(theirs):
    assert replacement_class(theirs, STOCK) is None


class Touched(DotProductAttention):
    def __init__(self, config, *args, **named):
        super().__init__(config, *args, **named)
        self.softmax_scale *= 3.0


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (Sharp, r"^Sharp sets attributes of core attention \(softmax_scale\)"),
        (Touched, "^the constructor of Touched reads"),
    ],
)
def test_what_a_constructor_does_besides_is_refused(theirs, message):
    with pytest.raises(ValueError, match=message):
        built(replacement_class(theirs, STOCK), 1)


class Blind(DotProductAttention):
    def __init__(self, config, layer_number, attn_mask_type, attention_type, **named):
        super().__init__(config, layer_number, AttnMaskType.no_mask, attention_type, **named)


def test_another_kind_of_mask_is_refused():
    with pytest.raises(ValueError, match=r"^Blind changes the mask type .* to AttnMaskType.no"):
        replacement_class(Blind, STOCK)(
            SimpleNamespace(), layer_number=1, attn_mask_type=AttnMaskType.causal,
            attention_type="self",
        )  # fmt: skip

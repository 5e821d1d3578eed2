# SPDX-License-Identifier: Apache-2.0
"""BurstAttention in the place of a core attention that derives from Megatron's.

Megatron-Bridge has such classes for models whose layers differ (Gemma 3, MiMo-V2-Flash): each
changes the configuration for its layer, windows and sinks for instance, and hands the rest to
Megatron's class. What it hands over is what BurstAttention is built from, so whatever the version
of Bridge decides for a layer holds here too.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType

from .. import patching
from .core_attention import AttentionCall, BurstCoreAttention
from .plan_book import WHOLE, RowChunking

# Attributes of classes that multiply values by a number before Megatron's class gets them.
_SCALES = {"MiMoV2FlashTEDotProductAttention": "_attention_value_scale"}
# What a class may define, besides its constructor, and still compute what its base does.
_HARMLESS = {
    "__init__", "__module__", "__doc__", "__qualname__", "__annotations__", "__annotate__",
    "__annotate_func__", "__annotations_cache__", "__firstlineno__", "__static_attributes__",
}  # fmt: skip


def stands_for(theirs: Any, stock: tuple[type, ...]) -> type | None:
    """The class that takes the place of `theirs`; None where that is not known to be exact.

    theirs: what a layer spec names as core attention. stock: Megatron's classes. Between the two
    only constructors may differ, and what `_SCALES` knows.
    """
    if not isinstance(theirs, type):
        return None
    mro = theirs.__mro__
    base = next((cls for cls in mro if cls in stock), None)
    if base is None:
        return None
    scale = None
    for cls in mro[: mro.index(base)]:
        changed = vars(cls).keys() - _HARMLESS
        if cls.__name__ in _SCALES and _only_scales(cls):
            scale = _SCALES[cls.__name__]
            changed -= {"forward"}
        if changed:
            return None
    words = {"theirs": theirs, "stock": base, "scale": scale}
    return type(f"Burst{theirs.__name__}", (DerivedCoreAttention,), words)


def _only_scales(cls: type) -> bool:
    """Whether the forward of a class of `_SCALES` reads nothing but the scale."""
    code = getattr(vars(cls).get("forward"), "__code__", None)
    known = {_SCALES[cls.__name__], "super", "forward"}
    return code is not None and set(code.co_names) <= known


class DerivedCoreAttention(BurstCoreAttention):
    """BurstAttention with what `theirs`, derived from `stock`, makes of a layer's configuration.

    theirs, stock, scale: of each class that `stands_for` makes. scale: the attribute of `theirs`
    by which values are multiplied, or None. Arguments, shapes and errors as of
    `BurstCoreAttention`; `ValueError` also for chunks of rows where values are scaled, and where
    `theirs` sets attributes that are not known here.
    """

    theirs: type
    stock: type
    scale: str | None

    def __init__(self, config: Any, *args: Any, **named: Any) -> None:
        self._images = bool(getattr(config, "is_vision_language", False))
        # Which layers have a window, only the whole model says.
        self._of_model = config
        handed, kept = self._built(_without_images(config), *args, **named)
        asked = named.get("attn_mask_type")
        if self._images:
            handed["attn_mask_type"] = AttnMaskType.causal
        elif asked is not None and handed.get("attn_mask_type") != asked:
            raise ValueError(
                f"{self.theirs.__name__} changes the kind of mask of its layers, from {asked} to "
                f"{handed.get('attn_mask_type')}, which BurstAttention does not follow: change the "
                "spec, or take --context-parallel-algo megatron"
            )
        scale = 1.0 if self.scale is None else kept[self.scale]
        self._value_scale = 1.0 if scale is None else scale
        super().__init__(**handed)
        if self._value_scale != 1.0 and super().sequence_chunks not in (1, "auto"):
            raise ValueError(
                f"--burst-sequence-chunks {super().sequence_chunks}: {self.theirs.__name__} scales "
                "the values of its layers, which chunks of rows do not know; leave the flag out"
            )

    def whole_config(self, config: Any) -> Any:
        return self._of_model

    @classmethod
    def _built(cls, *args: Any, **named: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the constructor of `theirs` hands to that of `stock`, and the attributes it sets."""
        original, handed = cls.stock.__init__, {}
        shell: Any = object.__new__(cls.theirs)

        def take(*args: Any, **named: Any) -> None:
            handed.update(patching.given_to(original, args, named))

        try:
            with patching.instead(cls.stock, "__init__", take):
                shell.__init__(*args, **named)
        except AttributeError as error:
            raise ValueError(
                f"{cls.theirs.__name__} uses the attention that its constructor makes ({error}), "
                "which BurstAttention does not follow: change the spec, or take "
                "--context-parallel-algo megatron"
            ) from error
        handed.pop("self")
        kept = vars(shell)
        if unknown := sorted(kept.keys() - {cls.scale}):
            raise ValueError(
                f"{cls.theirs.__name__} sets {', '.join(unknown)} of Megatron's attention, which "
                "BurstAttention does not know: change the spec, or take --context-parallel-algo "
                "megatron"
            )
        return handed, kept

    @property
    def sequence_chunks(self) -> Any:
        """As of `BurstCoreAttention`, but never several where values are scaled."""
        return super().sequence_chunks if self._value_scale == 1.0 else 1

    def call(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask_type: AttnMaskType | None,
        others: dict[str, Any],
        packed_seq_params: Any,
        rows: RowChunking = WHOLE,
    ) -> AttentionCall:
        """As of `BurstCoreAttention`, with the scale of the values."""
        kind = AttnMaskType.causal if self._images else attn_mask_type
        made = super().call(query, key, value, kind, others, packed_seq_params, rows)
        return made._replace(value_scale=self._value_scale)


def _without_images(config: Any) -> Any:
    """The configuration of a layer, as a text model has it.

    Bridge's Gemma 3 gives vision-language models masks of the whole sequence, in place of causality
    and windows; here layers keep these, and `vision.gemma3` adds the images.
    """
    if not getattr(config, "is_vision_language", False):
        return config
    config = copy.copy(config)
    config.is_vision_language = False
    return config

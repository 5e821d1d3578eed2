# SPDX-License-Identifier: Apache-2.0
"""BurstAttention in place of a core attention that derives from Megatron's.

Megatron-Bridge has such classes for models whose layers differ (Gemma 3 and 4, MiMo-V2-Flash). Each
changes the configuration for its layer, for example windows and sinks, and passes it to Megatron's
class. BurstAttention is built from the arguments that Megatron's class would get, so it follows the
choices of any version of Bridge.

A class may override `__init__`. `_VALUE_SCALES` lists the classes whose `forward` is known. Every
other override is refused.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType

from .. import patching
from .core_attention import AttentionCall, BurstCoreAttention
from .plan_book import WHOLE, RowChunking

# Classes whose `forward` only multiplies the values by an attribute and calls the inherited one
# (read in Bridge 0.5.0 to 0.6.0).
_VALUE_SCALES = {
    "megatron.bridge.models.mimo_v2_flash.modeling_mimo_v2_flash.MiMoV2FlashTEDotProductAttention":
        "_attention_value_scale",
}  # fmt: skip
# Attributes that a class may have: its constructor, and what Python adds to every class.
_ALLOWED = {
    "__init__", "__module__", "__doc__", "__qualname__", "__annotations__", "__annotate__",
    "__annotate_func__", "__annotations_cache__", "__firstlineno__", "__static_attributes__",
}  # fmt: skip


def stands_for(theirs: Any, stock: tuple[type, ...]) -> type | None:
    """Return the BurstAttention class that replaces `theirs`, if it derives from `stock`.

    Args:
        theirs: The core attention of a layer spec.
        stock: Megatron's core attentions.

    Returns:
        A subclass of `DerivedCoreAttention`, or None if `theirs` derives from no class of `stock`.

    Raises:
        ValueError: A class between `theirs` and `stock` overrides a method that is not known.
    """
    mro = theirs.__mro__ if isinstance(theirs, type) else ()
    base = next((cls for cls in mro if cls in stock), None)
    if base is None:
        return None
    scale = None
    for cls in mro[: mro.index(base)]:
        overridden = vars(cls).keys() - _ALLOWED
        if known := _VALUE_SCALES.get(patching.path_of(cls)):
            scale = known
            overridden -= {"forward"}
        if overridden:
            raise ValueError(_unknown_override(theirs, cls, sorted(overridden), stock))
    members = {"theirs": theirs, "stock": base, "scale": scale}
    return type(f"Burst{theirs.__name__}", (DerivedCoreAttention,), members)


def _unknown_override(
    theirs: type, cls: type, overridden: list[str], stock: tuple[type, ...]
) -> str:
    inherits = "" if cls is theirs else f", which inherits from {patching.path_of(cls)}"
    return (
        f"the layer spec has the core attention {patching.path_of(theirs)}{inherits}: "
        f"{cls.__name__} overrides {', '.join(overridden)}, which BurstAttention would not run. "
        f"Use {' or '.join(one.__name__ for one in stock)} in the spec, or a "
        "class that overrides only __init__, or --context-parallel-algo megatron"
    )


class DerivedCoreAttention(BurstCoreAttention):
    """BurstAttention with the configuration that `theirs` makes for a layer.

    Arguments and shapes are those of `BurstCoreAttention`. `stands_for` sets the class attributes.

    Attributes:
        theirs: The class of the layer spec.
        stock: Megatron's class from which `theirs` derives.
        scale: The attribute of `theirs` by which values are multiplied, or None.

    Raises:
        ValueError: Row chunks are chosen and values are scaled, or `theirs` sets attributes that
            are not known here. Also the errors of `BurstCoreAttention`.
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

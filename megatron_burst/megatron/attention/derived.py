# SPDX-License-Identifier: Apache-2.0
"""Replacement of core attention classes that derive from Megatron's classes.

Megatron-Bridge has such classes for models whose layers differ (Gemma 3 and 4, MiMo-V2-Flash). Each
class changes the configuration for its layer, for example the window or sink, and passes the result
to Megatron's class. BurstAttention is built from the arguments that Megatron's class would get, so
it does not depend on Bridge's names of settings, which change between versions.

A class may override `__init__`. `_VALUE_SCALES` lists the classes whose `forward` is supported.
Classes with any other override are refused.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType

from .. import patching
from .core_attention import AttentionCall, BurstCoreAttention
from .plan_book import ALL_ROWS, RowChunkSizes

# Classes whose `forward` only multiplies the values by an attribute and calls the inherited method
# (checked in Bridge 0.5.0 to 0.6.0).
_VALUE_SCALES = {
    "megatron.bridge.models.mimo_v2_flash.modeling_mimo_v2_flash.MiMoV2FlashTEDotProductAttention":
        "_attention_value_scale",
}  # fmt: skip
# Attributes that a class may define: its constructor, and attributes that Python adds.
_ALLOWED = {
    "__init__", "__module__", "__doc__", "__qualname__", "__annotations__", "__annotate__",
    "__annotate_func__", "__annotations_cache__", "__firstlineno__", "__static_attributes__",
}  # fmt: skip


def replacement_class(source: Any, stock: tuple[type, ...]) -> type | None:
    """Return the BurstAttention class that replaces `source`, if it derives from `stock`.

    Args:
        source: the core attention of a layer spec.
        stock: Megatron's core attentions.

    Returns:
        A subclass of `DerivedCoreAttention`, or None if `source` derives from no class of `stock`.

    Raises:
        ValueError: `source`, or a class from which it inherits, overrides a method that
            BurstAttention would not run.
    """
    mro = source.__mro__ if isinstance(source, type) else ()
    base = next((cls for cls in mro if cls in stock), None)
    if base is None:
        return None
    scale = None
    for cls in mro[: mro.index(base)]:
        overridden = vars(cls).keys() - _ALLOWED
        if scale_attribute := _VALUE_SCALES.get(patching.path_of(cls)):
            scale = scale_attribute
            overridden -= {"forward"}
        if overridden:
            raise ValueError(_unknown_override(source, cls, sorted(overridden), stock))
    members = {"source": source, "stock": base, "scale": scale}
    return type(f"Burst{source.__name__}", (DerivedCoreAttention,), members)


def _unknown_override(
    source: type, cls: type, overridden: list[str], stock: tuple[type, ...]
) -> str:
    inherits = "" if cls is source else f", which inherits from {patching.path_of(cls)}"
    return (
        f"the layer spec has the core attention {patching.path_of(source)}{inherits}: "
        f"{cls.__name__} overrides {', '.join(overridden)}, which BurstAttention would not run. "
        f"Use {' or '.join(base.__name__ for base in stock)} in the spec, or a "
        "class that overrides only __init__, or --context-parallel-algo megatron"
    )


class DerivedCoreAttention(BurstCoreAttention):
    """BurstAttention in place of a class that changes the configuration for its layer.

    `replacement_class` sets the class attributes. See `BurstCoreAttention` for arguments and
    shapes.

    Attributes:
        source: The class in the layer spec.
        stock: Megatron's class from which `source` derives.
        scale: Name of the attribute of `source` with the factor of the values, or None.

    Raises:
        ValueError: Row chunks are selected and values are scaled, or `source` sets unknown
            attributes. Also the errors of `BurstCoreAttention`.
    """

    source: type
    stock: type
    scale: str | None

    def __init__(self, config: Any, *args: Any, **named: Any) -> None:
        self._images = bool(getattr(config, "is_vision_language", False))
        # Only the configuration of the whole model states which layers have a window.
        self._model_config = config
        arguments, attributes = self._built(_without_images(config), *args, **named)
        requested = named.get("attn_mask_type")
        if self._images:
            arguments["attn_mask_type"] = AttnMaskType.causal
        elif requested is not None and arguments.get("attn_mask_type") != requested:
            raise ValueError(
                f"{self.source.__name__} changes the mask type of its layers from {requested} to "
                f"{arguments.get('attn_mask_type')}, which BurstAttention does not support: change "
                "the spec, or use --context-parallel-algo megatron"
            )
        scale = 1.0 if self.scale is None else attributes[self.scale]
        self._value_scale = 1.0 if scale is None else scale
        super().__init__(**arguments)
        if self._value_scale != 1.0 and super().sequence_chunks not in (1, "auto"):
            raise ValueError(
                f"--burst-sequence-chunks {super().sequence_chunks}: {self.source.__name__} scales "
                "the values of its layers, which row chunks do not support; remove the flag"
            )

    def whole_config(self, config: Any) -> Any:
        return self._model_config

    @classmethod
    def _built(cls, *args: Any, **named: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the arguments that `source` passes to the constructor of its base class `stock`.

        The constructor of `source` runs, but a function that records the arguments replaces the
        constructor of `stock` (Megatron's core attention).

        Returns:
            The arguments for `stock`, by name, and the attributes that `source` sets.
        """
        original, arguments = cls.stock.__init__, {}
        shell: Any = object.__new__(cls.source)

        def record(*args: Any, **named: Any) -> None:
            arguments.update(patching.given_to(original, args, named))

        try:
            with patching.instead(cls.stock, "__init__", record):
                shell.__init__(*args, **named)
        except AttributeError as error:
            raise ValueError(
                f"the constructor of {cls.source.__name__} reads attributes of Megatron's core "
                f"attention ({error}), which BurstAttention does not have: change the spec, or use "
                "--context-parallel-algo megatron"
            ) from error
        arguments.pop("self")
        attributes = vars(shell)
        if unknown := sorted(attributes.keys() - {cls.scale}):
            raise ValueError(
                f"{cls.source.__name__} sets attributes of core attention ({', '.join(unknown)}), "
                "which BurstAttention does not support: change the spec, or use "
                "--context-parallel-algo megatron"
            )
        return arguments, attributes

    @property
    def sequence_chunks(self) -> Any:
        """Number of row chunks of the layer's attention; 1 if values are scaled."""
        return super().sequence_chunks if self._value_scale == 1.0 else 1

    def prepare_call(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask_type: AttnMaskType | None,
        other_arguments: dict[str, Any],
        packed_seq_params: Any,
        rows: RowChunkSizes = ALL_ROWS,
    ) -> AttentionCall:
        """Return the result of `BurstCoreAttention.prepare_call`, with `value_scale` set."""
        kind = AttnMaskType.causal if self._images else attn_mask_type
        call = super().prepare_call(
            query, key, value, kind, other_arguments, packed_seq_params, rows
        )
        return call._replace(value_scale=self._value_scale)


def _without_images(config: Any) -> Any:
    """Return the configuration that the layer would have in a text model.

    Bridge's Gemma 3 gives vision-language models masks of the whole sequence, in place of causal
    masks and windows. Here layers keep causal masks and windows. The mask function `gemma3` of the
    plugin `vision` adds attention within images.
    """
    if not getattr(config, "is_vision_language", False):
        return config
    config = copy.copy(config)
    config.is_vision_language = False
    return config

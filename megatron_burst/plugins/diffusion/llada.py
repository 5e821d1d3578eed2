# SPDX-License-Identifier: Apache-2.0
"""LLaDA 1.5, a text model that denoises masked tokens, with attention in both directions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType

from ...config import BurstConfig
from ...megatron.attention.core_attention import AttentionCall, BurstCoreAttention
from ...megatron.attention.plan_book import ALL_ROWS, RowChunkSizes
from ...megatron.checks.problem import Problem
from ...megatron.patching import PatchSet
from . import bridge

PROVIDER = "LLaDA15ModelProvider"
_HOME, _CLASS = "models.llada15.llada15_attention", "LLaDA15TEDotProductAttention"
NEEDED = (bridge.Needed(_HOME, f"{_CLASS}.forward", ("query", "packed_seq_params")),)


class BidirectionalCoreAttention(BurstCoreAttention):
    """Replacement of Bridge's core attention of LLaDA 1.5 at context-parallel size > 1.

    Each token attends to all tokens of its document. See `BurstCoreAttention` for arguments and
    shapes.

    Args:
        config: Same as in `BurstCoreAttention`.
        layer_number: Same as in `BurstCoreAttention`.
        attn_mask_type: Ignored, as in Bridge: the layer spec of a GPT model has the causal mask.
        attention_type: Same as in `BurstCoreAttention`.
        named: Further arguments of `BurstCoreAttention`.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        **named: Any,
    ) -> None:
        super().__init__(config, layer_number, AttnMaskType.no_mask, attention_type, **named)

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
        """Return the result of `BurstCoreAttention.prepare_call` for attention without a mask."""
        kind = AttnMaskType.no_mask
        return super().prepare_call(
            query, key, value, kind, other_arguments, packed_seq_params, rows
        )

    def set_padding_mask(self, mask: torch.Tensor | None) -> None:
        """Refuse the padding masks that Bridge sets when it generates text.

        Args:
            mask: None, or the padding of a batch of prompts.

        Raises:
            ValueError: `mask` is not None.
        """
        if mask is not None:
            raise ValueError(
                "LLaDA 1.5 does not generate text over context-parallel ranks: build the model "
                "with context_parallel_size=1"
            )

    set_block_mask = set_padding_mask

    def reset_inference_state(self) -> None:
        """Do nothing: the module keeps no state for text generation."""


def patch_model(patches: PatchSet, is_ours: Callable[[Any], bool]) -> None:
    """Do nothing: the provider has a layer spec, in which `with_attention` replaces a class."""


def problems(model: Any, transformer: Any, burst: BurstConfig) -> Iterator[Problem]:
    """Yield a problem for each unsupported setting; see `DiffusionRecipes.problems`."""
    yield from bridge.option_problems(type(model).__name__, burst)


def with_attention(model: Any, layers: Any) -> Any:
    """Return the layer spec with `BidirectionalCoreAttention`.

    Args:
        model: The provider.
        layers: The layer spec.

    Raises:
        ValueError: The layer spec does not have Bridge's core attention, so layers would be causal.
    """
    stock = getattr(bridge.module(_HOME), _CLASS)
    if not bridge.contains(layers, stock):
        raise ValueError(
            f"model.transformer_layer_spec of {type(model).__name__} has no {_CLASS}, so the model "
            "would be causal: use Bridge's own layer spec"
        )
    bridge.log_choice(model, "attention in both directions")
    return bridge.replaced(layers, {stock: BidirectionalCoreAttention})


def patch_bridge() -> None:
    """Do nothing: Bridge has no training step of its own for LLaDA 1.5."""


def forward_step(recipe: Any) -> Any:
    """Refuse to train with the launcher.

    Args:
        recipe: The recipe.

    Raises:
        ValueError: Always.
    """
    raise ValueError(
        f"recipe: Bridge has no forward step for {type(recipe.model).__name__}: call apply_burst, "
        "and Bridge's pretrain with your own step"
    )

"""What a call of the core attention may ask for; everything else is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict

import torch
from megatron.core.transformer.enums import AttnMaskType

import megatron_burst as mb
from megatron_burst.megatron.checks.command_line import RESET
from megatron_burst.megatron.data.cut import Cut, unpacked
from megatron_burst.megatron.data.loader_masks import documents_expected

_CAUSAL = {AttnMaskType.causal: True, AttnMaskType.no_mask: False}
# Megatron's names for the same masks when documents are packed.
CAUSAL_PACKED = _CAUSAL | {AttnMaskType.padding_causal: True, AttnMaskType.padding: False}

# (q, k, v, kind of mask) -> what core attention returns.
Answer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Any], torch.Tensor]


class Call(TypedDict):
    """What a call of `mb.attention` takes besides tensors."""

    plan: mb.Plan
    sink: torch.Tensor | None
    max_logits: torch.Tensor | None
    label: int


def check_call(mask_type: AttnMaskType, asked: dict[str, Any], packed: Any, cut: Cut) -> None:
    """Raise ``ValueError`` unless a call with this kind of mask and these arguments is honoured.

    asked: Megatron's arguments that must be None, by name; packed: a ``PackedSeqParams`` or None.
    """
    known = _CAUSAL if packed is None else CAUSAL_PACKED
    if packed is None and documents_expected():
        raise ValueError(
            f"{RESET}, and the script handed no documents to the model: pass packed_seq_params "
            f"made of the batch's cu_seqlens, as pretrain_gpt.py does, or remove {RESET}"
        )
    if packed is None and cut.name == "balanced":
        raise unpacked()
    if mask_type not in known:
        raise ValueError(
            f"attention mask type {mask_type} is not supported: only causal and no_mask are"
        )
    fixes = {
        "attention_mask": (
            "a tensor of s x s could mean anything; call the model with attention_mask=None, which "
            "is causal, and with packed_seq_params for documents. Megatron's own data loaders make "
            "none with --no-create-attention-mask-in-dataloader"
        ),
        "attention_bias": "remove the relative position bias",
    }
    for name, value in asked.items():
        if value is not None:
            raise ValueError(f"{name} is not supported; {fixes.get(name, 'leave it out')}")
    if packed is None:
        return
    form = getattr(packed, "qkv_format", None)
    if form != "thd":
        raise ValueError(f"packed_seq_params: qkv_format must be 'thd', got {form!r}")
    order = getattr(packed, "cp_partition_mode", None)  # Megatron-LM's branch dev
    if order not in (None, "zigzag"):
        raise ValueError(
            f"packed_seq_params: cp_partition_mode is {order!r}: rows would get positions of "
            "others; only 'zigzag' is supported"
        )


def check_pack(config: Any, layout: mb.layout.Layout, total: int, size: int, uncut: bool) -> None:
    """Raise ``ValueError`` unless a pack of ``total`` tokens was laid out as attention expects.

    layout: of the pack over ``size`` ranks. uncut: this rank should have cut it, and did not.
    """
    if isinstance(layout, mb.layout.Balanced) and uncut:
        raise ValueError(
            f"layout balanced: nothing here cut the {total} tokens of this pack by it. "
            "What cut them (Transformer Engine's thd_get_partitioned_indices, or a loader "
            "for another model) gave this rank other tokens: let "
            "utils.get_batch_on_this_cp_rank of Megatron-Core or "
            "megatron_burst.megatron.shard_sequence cut whole packs, in the process that "
            "trains, or take --burst-layout zigzag"
        )
    documents_apart = size == 1 or isinstance(layout, mb.layout.DocumentZigzag)
    if getattr(config, "apply_rope_fusion", False) and not documents_apart:
        raise ValueError(
            "fused rope of packed sequences works only with --burst-layout zigzag and "
            f"documents of multiples of 2 x --context-parallel-size ({2 * size}) tokens: add "
            "--no-rope-fusion"
        )

# SPDX-License-Identifier: Apache-2.0
"""Cross-attention of packed clips to their texts. Every rank holds all texts.

The queries of a rank are its rows of the clips, in the layout of the run. A rank computes the
gradients of keys and values for its own queries only: Megatron adds the gradients of weights over
context-parallel ranks.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.transformer.enums import AttnMaskType
from torch.utils.weak import WeakIdKeyDictionary

from ...layout import Replicated
from ...masks import Documents, Mask
from ...megatron.attention.core_attention import BurstCoreAttention, check_pack
from ...megatron.attention.plan_book import LayerKind, PlanBook, RowChunkSizes, Tensors
from ...megatron.data.other_cuts import check_cut
from ...megatron.data.packed import Pack, packs
from ...planning.prepare import AttentionOperation
from . import bridge


@dataclass(frozen=True)
class CrossPack(Pack):
    """A pack of clips, with the texts that the clips attend to.

    Attributes:
        clips: Boundaries of the clips and of the padding after each clip, alternating.
        texts: Boundaries of the texts and of the padding after each text, alternating.
    """

    clips: tuple[int, ...] = ()
    texts: tuple[int, ...] = ()

    @property
    def mask(self) -> Mask:
        """Mask in which each token of a clip sees the text of the clip."""
        padding = range(1, len(self.clips) - 1, 2)
        return Documents(self.clips, padding=padding, key_cu_seqlens=self.texts)


@dataclass(frozen=True)
class CrossKind(LayerKind):
    """Kind of cross-attention layers; keys are replicated on all ranks.

    Layers of equal kind share plans.
    """

    def own_mask(self, pack: Pack | None, seq_len: int) -> Mask | None:
        """Return the mask of clips and texts; see `Kind.own_mask`."""
        return None if pack is None else pack.mask

    def operation(
        self, book: PlanBook, tensors: Tensors, pack: Pack | None, rows: RowChunkSizes, own: Any
    ) -> AttentionOperation:
        """Return the `AttentionOperation` for q [s, b, h, d], k [k, b, g, d] and v [k, b, g, w]."""
        operation = super().operation(book, tensors, pack, rows, own)
        options = dataclasses.replace(
            operation.options, mask=own, key_layout=Replicated(sum_gradients=False), store=None
        )
        return dataclasses.replace(operation, options=options)

    def log(self, book: PlanBook, plan: Any, tensors: Tensors, pack: Pack | None, own: Any) -> None:
        """Log nothing: ranks send nothing in cross-attention."""


class CrossCoreAttention(BurstCoreAttention):
    """Core attention of packed clips to their texts at context-parallel size > 1.

    Args:
        config: Same as in `BurstCoreAttention`.
        layer_number: Same as in `BurstCoreAttention`.
        attn_mask_type: Same as in `BurstCoreAttention`.
        attention_type: "cross".
        named: Further arguments of `BurstCoreAttention`.

    Raises:
        ValueError: Same as in `BurstCoreAttention`.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        **named: Any,
    ) -> None:
        if attention_type != "cross":
            raise ValueError(f"attention_type is {attention_type!r}; it must be 'cross'")
        super().__init__(config, layer_number, attn_mask_type, "self", **named)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **unknown: Any,
    ) -> torch.Tensor:
        """Compute attention of this rank's rows of the clips to the texts.

        Args:
            query: [t, h, d], this rank's rows of the clips.
            key: [k, g, d], rows of all texts. Rows after the last text are ignored.
            value: [k, g, w].
            attention_mask: Must be None.
            attn_mask_type: `AttnMaskType.no_mask`; None for the mask type of the layer.
            attention_bias: Must be None.
            packed_seq_params: Clips (`cu_seqlens_q`) and texts (`cu_seqlens_kv`).
            unknown: Further keywords of Megatron; all values must be None.

        Returns:
            [t, h*w].

        Raises:
            ValueError: Arguments are not supported; all ranks raise the same error.
        """
        with self.book.shared_errors(self.leads):
            if packed_seq_params is None:
                raise ValueError(
                    "packed_seq_params is None: cross-attention requires the boundaries of the "
                    "clips and of the texts"
                )
            ranks = self._book(packed_seq_params).groups.size
            keys = self._cross_pack(packed_seq_params, len(query) * ranks).texts[-1]
            if len(key) < keys:
                raise ValueError(
                    f"key has {len(key)} rows, and the texts have {keys}: every rank must hold all "
                    "texts. Bridge's training step passes them; videos are not generated over "
                    "context-parallel ranks"
                )
        return super().forward(
            query,
            key[:keys],
            value[:keys],
            attention_mask,
            attn_mask_type,
            attention_bias,
            packed_seq_params,
            **unknown,
        )

    def _layer_kind(self, mask_type: AttnMaskType) -> CrossKind:
        return bridge.as_subclass(super()._layer_kind(mask_type), CrossKind)

    def _pack(self, book: PlanBook, params: Any, query: torch.Tensor) -> CrossPack:
        size = book.groups.size
        pack = self._cross_pack(params, len(query) * size)
        check_cut(params, pack, self.cut, size, self._cuts)
        check_pack(self.config, pack.layout(self.cut, size), size)
        return pack

    def _cross_pack(self, params: Any, total: int) -> CrossPack:
        """Return the pack of a `PackedSeqParams`, whose tensors are read from the device once.

        Args:
            params: The `PackedSeqParams`.
            total: Rows of the clips over all ranks.
        """
        cache = self.book.groups.cache.setdefault("cross packs", WeakIdKeyDictionary())
        made = cache.setdefault(params, {})
        if total not in made:
            clips = packs().of(total, params.cu_seqlens_q, params.cu_seqlens_q_padded)
            pack = bridge.as_subclass(
                clips,
                CrossPack,
                clips=_alternating(params.cu_seqlens_q, params.cu_seqlens_q_padded, total),
                texts=_alternating(params.cu_seqlens_kv, params.cu_seqlens_kv_padded),
            )
            packs().share_cut(pack)
            made[total] = pack
        return made[total]


def _alternating(
    ends: torch.Tensor, padded: torch.Tensor | None, total: int | None = None
) -> tuple[int, ...]:
    """Return boundaries of documents and of the padding after each document.

    Args:
        ends: Cumulative lengths without padding, [n + 1].
        padded: Cumulative lengths with padding, or None.
        total: End of the padding after the last document; None for the last entry of `padded`.

    Returns:
        2 n + 1 boundaries: start of document 0, end of document 0, start of document 1, ...
    """
    lengths = np.diff(packs().values(ends).astype(np.int64).flatten())
    starts = packs().values(ends if padded is None else padded).astype(np.int64).flatten()
    bounds = np.empty(2 * len(lengths) + 1, dtype=np.int64)
    bounds[::2], bounds[1::2] = starts, starts[:-1] + lengths
    bounds[-1] = starts[-1] if total is None else total
    return tuple(bounds.tolist())

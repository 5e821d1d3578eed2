"""Rotary embeddings of Megatron with tables of the rows of a rank (`rotary_tables`).

The functions here replace the methods of Megatron's rotary embeddings that make tables, and the
functions that apply tables to packed batches.

Shape letters: S tokens of the whole sequence.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import (
    MultimodalRotaryEmbedding,
    RotaryEmbedding,
)
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

import megatron_burst as mb
from megatron_burst.layout.sharding import to_device
from megatron_burst.megatron.attention.micro_batch import ONE_RANK
from megatron_burst.megatron.data.cut import cut_of_run
from megatron_burst.megatron.data.packed import packs
from megatron_burst.megatron.data.rotary_tables import ALL, Held, is_blank, tables
from megatron_burst.megatron.patching.compatibility import require_parameters


def rope_patches(layout: str) -> list[tuple[Any, str, Callable]]:
    """(class, method, replacement) of what makes rotary tables in a run of that layout.

    Raises ``RuntimeError`` if one of Megatron's methods lacks an expected parameter.
    """
    named = ["max_seq_len", "offset", "packed_seq", "cp_group"]
    for cls in (RotaryEmbedding, YarnRotaryEmbedding):
        require_parameters(cls.forward, named, f"{cls.__name__}.forward")
    made, cached = YarnRotaryEmbedding._set_cos_sin_cache, YarnRotaryEmbedding.get_cached_cos_sin
    require_parameters(made, ["seq_len"], "YarnRotaryEmbedding._set_cos_sin_cache")
    named = ["seq_len", "offset", "dtype", "packed_seq"]
    require_parameters(cached, named, "YarnRotaryEmbedding.get_cached_cos_sin")
    several = MultimodalRotaryEmbedding.forward
    require_parameters(several, ["position_ids", "cp_group"], "MultimodalRotaryEmbedding.forward")
    return [
        (RotaryEmbedding, "forward", _forward(RotaryEmbedding.forward, layout, scaled=False)),
        (YarnRotaryEmbedding, "forward", _forward(YarnRotaryEmbedding.forward, layout, True)),
        (YarnRotaryEmbedding, "_set_cos_sin_cache", _without_rows(made)),
        (YarnRotaryEmbedding, "get_cached_cos_sin", _cos_sin(cached, layout)),
        (MultimodalRotaryEmbedding, "forward", _of_own_positions(several, layout)),
    ]


def _forward(original: Callable, layout: str, scaled: bool) -> Callable:
    @functools.wraps(original)
    def forward(
        self: Any, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None
    ) -> Any:
        held = _held(layout, self.cp_group if cp_group is None else cp_group)
        if packed_seq and held.size > 1:
            table = tables().blank(self, max_seq_len)
        else:
            table = tables().rows(self, max_seq_len, offset, held)
        return (table, tables().rates(self).scale) if scaled else table

    # Megatron empties the cache that its own method has.
    forward.cache_clear = lambda: None  # pyright: ignore
    return forward


def _without_rows(original: Callable) -> Callable:
    """Yarn's cache without rows: its constructor fills one that no layer asks for."""

    @functools.wraps(original)
    def _set_cos_sin_cache(self: Any, seq_len: int, *args: Any, **named: Any) -> None:
        self.max_seq_len_cached = self.offset_cached = 0
        self.dtype_cached, self.packed_seq_cached = None, False
        for name in ("cos_cached", "sin_cached"):
            self.register_buffer(name, torch.empty(0), persistent=False)

    return _set_cos_sin_cache


def _cos_sin(original: Callable, layout: str) -> Callable:
    """Cosines and sines of the rank's rows. For packed batches of all positions of a document: the
    fused kernels that take them choose rows themselves."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def get_cached_cos_sin(*args: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        bound = signature.bind(*args, **named)
        bound.apply_defaults()
        self, length, offset, dtype, packed = bound.args
        held = ALL if packed else _held(layout, self.cp_group)
        return tables().cos_sin(self, length, offset, held, dtype)

    return get_cached_cos_sin


def _of_own_positions(original: Callable, layout: str) -> Callable:
    """Angles of several axes: ``position_ids`` [3, batch, S] are cut, instead of their angles."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def forward(*args: Any, **named: Any) -> torch.Tensor:
        bound = signature.bind(*args, **named)
        given = bound.arguments
        group = given.get("cp_group")
        held = _held(layout, given["self"].cp_group if group is None else group)
        if held.size == 1:
            return original(*args, **named)
        ids = given["position_ids"]
        mine = to_device(held.positions(ids.shape[-1]), ids.device)
        given["position_ids"] = ids.index_select(-1, mine)
        given["cp_group"] = ONE_RANK
        return original(*bound.args, **bound.kwargs)

    return forward


def packed_rope(original: Callable, rotate: Callable, layout: str) -> Callable:
    """A replacement for ``rope_utils._apply_rotary_pos_emb_thd``, for documents of any length.

    rotate: ``rope_utils._apply_rotary_pos_emb_bshd``. The original runs if each document is laid
    out by itself, as Megatron does it.
    """
    require_parameters(
        original, ["t", "cu_seqlens", "freqs", "cp_group"], "rope_utils._apply_rotary_pos_emb_thd"
    )
    signature = inspect.signature(original)
    of_rotate = inspect.signature(rotate).parameters

    @functools.wraps(original)
    def _apply_rotary_pos_emb_thd(*args: Any, **kwargs: Any) -> torch.Tensor:
        bound = signature.bind(*args, **kwargs)
        t, cu_seqlens, freqs, group = (
            bound.arguments.pop(name, None) for name in ("t", "cu_seqlens", "freqs", "cp_group")
        )
        # Newer versions also take max_seqlen, which only their own slicing needs.
        named = {k: x for k, x in bound.arguments.items() if k in of_rotate}
        if group is not None and is_blank(freqs):
            angles = tables().of_pack(freqs, t.shape[0], cu_seqlens, _held(layout, group))
            return rotate(t.unsqueeze(1), angles, **named).squeeze(1)
        if group is None or group.size() == 1:
            return original(*args, **kwargs)
        pack, cut = packs().of(t.shape[0] * group.size(), cu_seqlens), cut_of_run(layout)
        if isinstance(pack.layout(cut, group.size()), mb.layout.DocumentZigzag):
            return original(*args, **kwargs)
        index = pack.index(cut, group.size(), group.rank(), freqs.device, freqs.shape[0])
        return rotate(t.unsqueeze(1), freqs[index], **named).squeeze(1)

    return _apply_rotary_pos_emb_thd


def fused_packed_rope(original: Callable, layout: str) -> Callable:
    """A replacement for ``rope_utils.fused_apply_rotary_pos_emb_thd``, which chooses rows of tables
    of whole documents: the fused kernel of batches that are not packed takes those of the rank."""
    names = ["t", "cu_seqlens", "freqs", "cp_size", "cp_rank"]
    require_parameters(original, names, "rope_utils.fused_apply_rotary_pos_emb_thd")
    signature = inspect.signature(original)

    @functools.wraps(original)
    def fused_apply_rotary_pos_emb_thd(*args: Any, **kwargs: Any) -> torch.Tensor:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        t, freqs = given["t"], given["freqs"]
        if not is_blank(freqs):
            return original(*args, **kwargs)
        held = Held(layout, given["cp_size"], given["cp_rank"])
        angles = tables().of_pack(freqs, t.shape[0], given["cu_seqlens"], held)
        named = {"interleaved": True} if given.get("interleaved") else {}
        turned = rope_utils.fused_apply_rotary_pos_emb(t.unsqueeze(1), angles, **named)
        return turned.squeeze(1)

    return fused_apply_rotary_pos_emb_thd


def _held(layout: str, group: Any) -> Held:
    return ALL if group is None or group.size() == 1 else Held(layout, group.size(), group.rank())

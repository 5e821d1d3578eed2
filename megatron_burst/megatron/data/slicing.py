"""Slicing batches and rotary embeddings for layouts and packed batches that Megatron lacks.

The functions here replace Megatron's own slicing functions (`shifting` has that of multi-token
prediction). A run has one layout, because Megatron
slices batches before it knows the model, and caches rotary embeddings.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state, utils
from megatron.core.models.common.embeddings import (  # noqa: F401  two from-import what we replace
    rope_utils,
    rotary_pos_embedding,
    yarn_rotary_pos_embedding,
)
from megatron.core.transformer import multi_token_prediction as mtp

import megatron_burst as mb
from megatron_burst.megatron.checks import translation
from megatron_burst.megatron.data.cut import Cut, cut_of_run
from megatron_burst.megatron.data.packed import packs
from megatron_burst.megatron.data.rope import fused_packed_rope, packed_rope
from megatron_burst.megatron.data.rotary_tables import check_length
from megatron_burst.megatron.data.shifting import roll
from megatron_burst.megatron.patching.compatibility import require_parameters

_NOT_SEQUENCES = (
    "cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size", "hybrid_cp_group",
)  # fmt: skip


def slicing_patches(layout: str) -> list[tuple[Any, str, Callable]]:
    """(module, name, replacement) of each function that depends on the order of tokens in a run of
    that layout.

    Raises ``RuntimeError`` if one of Megatron's functions lacks an expected parameter.
    """
    name = "get_batch_on_this_cp_rank"
    found = [(utils, name, batch_slicer(getattr(utils, name), layout))]
    name = "get_thd_batch_on_this_cp_rank"
    if hasattr(utils, name):  # until 0.17; later versions have one function for both
        found.append((utils, name, packed_batch_slicer(getattr(utils, name), layout)))
    name = "_apply_rotary_pos_emb_thd"
    rotate = rope_utils._apply_rotary_pos_emb_bshd
    found.append((rope_utils, name, packed_rope(getattr(rope_utils, name), rotate, layout)))
    name = "get_pos_emb_on_this_cp_rank"
    rope = rope_slicer(getattr(rope_utils, name), layout)
    if layout != "zigzag":  # Megatron's own
        found.append((rope_utils, name, rope))
    name = "fused_apply_rotary_pos_emb_thd"
    if getattr(rope_utils, name, None) is not None:  # Transformer Engine is installed
        fused = getattr(rope_utils, name)
        found.append((rope_utils, name, fused_packed_rope(fused, layout)))
    name = "roll_tensor"
    found.append((mtp, name, roll(getattr(mtp, name), layout)))
    return found


def batch_slicer(original: Callable, layout: str) -> Callable:
    """A replacement for ``megatron.core.utils.get_batch_on_this_cp_rank`` (0.16 to 0.20).

    The original slices unpacked batches of a zigzag run.
    """
    require_parameters(original, ["batch"], "utils.get_batch_on_this_cp_rank")
    signature = inspect.signature(original)

    @functools.wraps(original)
    def get_batch_on_this_cp_rank(*args: Any, **kwargs: Any) -> dict[str, Any]:
        bound = signature.bind(*args, **kwargs)
        batch, group = bound.arguments["batch"], bound.arguments.get("cp_group")
        packed = batch.get("cu_seqlens") is not None
        if packed and bound.arguments.get("is_hybrid_cp"):
            return _of_own_group(batch, bound.arguments.get("hybrid_cp_group_func"), layout)
        group = context_group(group)
        if group.size() == 1 or (not packed and layout == "zigzag"):
            return original(*args, **kwargs)
        if packed:
            documents = batch["cu_seqlens"], batch.get("cu_seqlens_padded")
            return take(batch, documents, cut_of_run(layout), group.size(), group.rank())
        for key in [key for key, _ in _sequences(batch)]:
            # An attention mask is [batch, 1, queries, keys], of which ranks divide the queries.
            batch[key] = _shard(batch[key], layout, group, 2 if key == "attention_mask" else 1)
        return batch

    return get_batch_on_this_cp_rank


def _of_own_group(
    batch: dict[str, Any], group_of_size: Callable | None, layout: str
) -> dict[str, Any]:
    """The part of a micro-batch that has a group of its own, of ``local_cp_size`` ranks.

    The original cuts the whole pack in zigzag order, attention every document.
    """
    size = batch.get("local_cp_size")
    if size is None or group_of_size is None:
        raise ValueError(
            "is_hybrid_cp: the batch needs local_cp_size, and get_batch_on_this_cp_rank needs "
            "hybrid_cp_group_func, which makes a group of it"
        )
    if int(size) == 1:
        return batch
    group = group_of_size(group_size=int(size))
    documents = batch["cu_seqlens"], batch.get("cu_seqlens_padded")
    cut = cut_of_run(layout)
    return take(batch, documents, cut, group.size(), group.rank()) | {"hybrid_cp_group": group}


def packed_batch_slicer(original: Callable, layout: str) -> Callable:
    """A replacement for ``megatron.core.utils.get_thd_batch_on_this_cp_rank``: (batch, params)."""
    names = ["batch", "cu_seqlens", "cu_seqlens_padded", "max_seqlen", "cp_size", "cp_rank"]
    require_parameters(original, names, "utils.get_thd_batch_on_this_cp_rank")
    signature = inspect.signature(original)

    @functools.wraps(original)
    def get_thd_batch_on_this_cp_rank(*args: Any, **kwargs: Any) -> tuple[dict[str, Any], Any]:
        asked = signature.bind(*args, **kwargs).arguments
        size, rank = asked.pop("cp_size", None), asked.pop("cp_rank", None)
        size = context_group(None).size() if size is None else size
        rank = context_group(None).rank() if rank is None else rank
        batch, params = original(**asked, cp_size=1, cp_rank=0)
        documents = asked["cu_seqlens"], asked["cu_seqlens_padded"]
        if size > 1:
            batch = take(batch, documents, cut_of_run(layout), size, rank)
        return batch, params

    return get_thd_batch_on_this_cp_rank


def _sequences(batch: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    return [(k, x) for k, x in batch.items() if x is not None and k not in _NOT_SEQUENCES]


def take(
    batch: dict[str, Any], documents: tuple[Any, Any], cut: Cut, size: int, rank: int
) -> dict[str, Any]:
    """The part of a packed batch [1, tokens] that ``rank`` of ``size`` ranks holds."""
    names = [key for key, _ in _sequences(batch)]
    if "attention_mask" in names:
        raise translation.user_error(
            "packed sequences come without attention_mask: pass "
            "--no-create-attention-mask-in-dataloader"
        )
    for key in names:
        shape = tuple(batch[key].shape)
        if shape[:2] != (1, batch[names[0]].shape[1]):
            raise translation.user_error(
                f"packed sequences need --micro-batch-size 1 and one length, got {key} of shape "
                f"{shape}"
            )
    if names:
        pack = packs().of(batch[names[0]].shape[1], *documents)
        packs().note_cut(pack)
        for key in names:  # each whole sequence is gone before the next one is cut
            index = pack.index(cut, size, rank, batch[key].device)
            batch[key] = batch[key].index_select(1, index)
    return batch


def rope_slicer(original: Callable, layout: str) -> Callable:
    """A replacement for ``rope_utils.get_pos_emb_on_this_cp_rank``."""
    require_parameters(
        original, ["pos_emb", "seq_dim", "cp_group"], "rope_utils.get_pos_emb_on_this_cp_rank"
    )

    @functools.wraps(original)
    def get_pos_emb_on_this_cp_rank(pos_emb: torch.Tensor, seq_dim: int, cp_group: Any = None):
        if cp_group is None:
            raise ValueError("cp_group is None: positions per rank need the group of the rank")
        return _shard(pos_emb, layout, cp_group, seq_dim)

    return get_pos_emb_on_this_cp_rank


def _shard(x: torch.Tensor, layout: str, group: Any, dim: int) -> torch.Tensor:
    size = group.size()
    if size == 1:
        return x
    check_length(x.size(dim), layout, size)
    return mb.shard(x, mb.layout.make(layout, cp_size=size), group.rank(), dim=dim)


def context_group(group: Any = None) -> Any:
    """``group``, or the context-parallel group of this process."""
    if group is not None:
        return group
    return parallel_state.get_context_parallel_group()

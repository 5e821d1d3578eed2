# SPDX-License-Identifier: Apache-2.0
"""The entries of a batch that are cut over context-parallel ranks, and along which dimension.

The same rules apply to every layout and to packed batches; a table in `docs/megatron-lm.md` lists
them. An entry that fits no row of the table is refused; the error names its key and shape.

Shape letters: b batch, s tokens of the whole sequence.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch

from .. import patching

MASK, POSITIONS = "attention_mask", "position_ids"
# Entries with one value per token. The first of these keys in a batch determines b and s.
SEQUENCES = ("tokens", "input_ids", "labels", "loss_mask", POSITIONS)
# Entries that describe documents, groups or images, whatever their shape.
_UNCUT = frozenset({
    "cu_seqlens", "cu_seqlens_padded", "cu_seqlens_unpadded", "cu_seqlens_argmin",
    "cu_seqlens_unpadded_argmin", "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded",
    "cu_seqlens_kv_padded", "max_seqlen", "max_seqlen_q", "max_seqlen_kv", "total_tokens",
    "token_count", "local_cp_size", "hybrid_cp_group", "pixel_values", "pixel_values_videos",
    "image_grid_thw", "video_grid_thw", "second_per_grid_ts", "image_sizes",
})  # fmt: skip
NO_MASK = (
    "omit the mask: pass --no-create-attention-mask-in-dataloader to Megatron-LM, set "
    "dataset.skip_getting_attention_mask_from_dataset=True in Megatron-Bridge, or set "
    'batch["attention_mask"] = None'
)


class EntryDims(NamedTuple):
    """The entries of a batch that are cut.

    Attributes:
        dims: The dimension along which each entry is cut, by key.
        length: s; 0 if no entry is cut.
    """

    dims: dict[str, int]
    length: int


def documents_of(batch: dict[str, Any]) -> tuple[Any, Any] | None:
    """Return the cumulative lengths of documents in a packed batch.

    They are entries `cu_seqlens` or `cu_seqlens_q` of the batch, or fields of an entry
    `packed_seq_params`.

    Returns:
        (lengths without padding, lengths with padding or None); None for a batch that is not
            packed.
    """
    if batch.get("cu_seqlens") is not None:
        return batch["cu_seqlens"], batch.get("cu_seqlens_padded")
    if batch.get("cu_seqlens_q") is not None:
        return batch["cu_seqlens_q"], batch.get("cu_seqlens_q_padded")
    params: Any = batch.get("packed_seq_params")
    if getattr(params, "cu_seqlens_q", None) is None:
        return None
    return params.cu_seqlens_q, getattr(params, "cu_seqlens_q_padded", None)


def placeholder(mask: Any) -> bool:
    """Return whether an attention mask is a placeholder (a tensor with one element).

    Data loaders add a placeholder if a model requires a mask argument. Transformer Engine reads no
    mask tensor in causal attention (`is_redundant` in `attention/core_attention.py`).
    """
    return isinstance(mask, torch.Tensor) and mask.numel() == 1


def entries_to_cut(batch: dict[str, Any], packed: bool) -> EntryDims:
    """Return the entries of a batch that are cut.

    Args:
        batch: entries by key. Entries that are not tensors are never cut.
        packed: whether the batch is one packed row of documents, [1, s].

    Raises:
        ValueError: An entry fits no row of the table in `docs/megatron-lm.md`.
    """
    tensors = {
        key: tuple(value.shape)
        for key, value in batch.items()
        if isinstance(value, torch.Tensor) and key not in _UNCUT
    }
    if placeholder(batch.get(MASK)):
        del tensors[MASK]
    if packed and MASK in tensors:
        raise patching.user_error(
            f"{_entry(MASK, tensors)}: packed sequences must not have a mask; {NO_MASK}"
        )
    rows, length = _sizes(tensors)
    if packed and length and rows != 1:
        name = next(key for key, shape in tensors.items() if shape[:2] == (rows, length))
        raise patching.user_error(
            f"{_entry(name, tensors)}: packed sequences require --micro-batch-size 1"
        )
    dims = {key: _dim(key, tensors, rows, length, packed) for key in tensors}
    cut_dims = {key: dim for key, dim in dims.items() if dim is not None}
    return EntryDims(cut_dims, length if cut_dims else 0)


def _sizes(tensors: dict[str, tuple[int, ...]]) -> tuple[int, int]:
    """Return (b, s) of a batch; (0, 0) if no entry has one value per token."""
    for key in SEQUENCES:
        shape = tensors.get(key, ())
        if len(shape) == 2 or (len(shape) > 2 and key != POSITIONS):
            return shape[0], shape[1]
    positions = tensors.get(POSITIONS, ())
    if len(positions) == 3:
        return positions[1], positions[2]
    unnamed = {key: x for key, x in tensors.items() if len(x) > 1 and key not in (MASK, POSITIONS)}
    sizes = {(shape[0], shape[1]) for shape in unnamed.values()}
    if len(sizes) > 1:
        shapes = ", ".join(f"{key} {list(shape)}" for key, shape in unnamed.items())
        raise ValueError(
            f"the batch has none of {', '.join(SEQUENCES)}, and its tensors have different first "
            f"dimensions ({shapes}), so their length is ambiguous: cut each tensor with "
            "megatron_burst.megatron.shard_sequence"
        )
    if sizes:
        return sizes.pop()
    mask = tensors.get(MASK, ())
    return (mask[0], mask[2]) if len(mask) == 4 else (0, 0)


def _dim(
    key: str, tensors: dict[str, tuple[int, ...]], rows: int, length: int, packed: bool
) -> int | None:
    """Return the dimension along which an entry is cut; None if it is not cut."""
    shape = tensors[key]
    if key == MASK:
        if len(shape) == 4 and shape[0] in (1, rows) and shape[2] == length:
            return 2  # the dimension of queries
        raise patching.user_error(
            f"{_entry(key, tensors)} is not [b, 1, s, s], so its queries cannot be cut, and "
            f"attention is causal without a mask; {NO_MASK}"
        )
    if key == POSITIONS and len(shape) == 3 and shape[1] in (1, rows) and shape[2] == length:
        if packed:
            raise ValueError(
                f"{_entry(key, tensors)}: positions of several axes (M-RoPE) do not work with "
                "packed sequences, because Megatron selects the angles of packed documents by "
                "the index in the pack; do not pack: use a batch [b, s] with one sequence in each "
                "of the b rows, and remove cu_seqlens"
            )
        return None  # M-RoPE cuts the angles
    if shape[:2] == (rows, length) or (key == POSITIONS and shape == (1, length)):
        return 1
    if key in SEQUENCES:
        _refuse_length(key, tensors, rows, length, packed)
    if length and length in shape[:2]:
        raise ValueError(
            f"{_entry(key, tensors)}: the shape does not show whether this entry has one value per "
            f"token. Shapes with one value per token must start with [b, s] = [{rows}, {length}]: "
            "reshape the entry, or remove it from the batch and cut it with "
            "megatron_burst.megatron.shard_sequence(x, dim=...)"
        )
    return None


def _refuse_length(
    key: str, tensors: dict[str, tuple[int, ...]], rows: int, length: int, packed: bool
) -> NoReturn:
    remedy = "packed sequences require one length and --micro-batch-size 1" if packed else (
        "entries with one value per token must have one shape [b, s], and position_ids of several "
        "axes (M-RoPE) [axes, b, s]"
    )  # fmt: skip
    first = next((name for name in SEQUENCES if tensors.get(name, ())[:2] == (rows, length)), None)
    comparison = f" with {_entry(first, tensors)}" if first else ""
    raise patching.user_error(f"{_entry(key, tensors)}{comparison}: {remedy}")


def _entry(key: str, tensors: dict[str, tuple[int, ...]]) -> str:
    return f"batch entry {key} of shape {list(tensors[key])}"

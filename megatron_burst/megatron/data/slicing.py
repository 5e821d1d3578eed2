# SPDX-License-Identifier: Apache-2.0
"""Functions that cut, gather and shift sequences in the layout of the run.

`slicing_patches` returns wrappers of Megatron's slicing functions and of `roll_tensor`, with which
multi-token prediction shifts tokens, position ids, labels and loss masks by one position.
`shard_sequence` and `gather_sequence` are for scripts with their own data path, and for reading
outputs. A run has one layout: Megatron slices batches and caches rotary embeddings independently of
the model.

Shape letters: s tokens of this context-parallel rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state, utils
from megatron.core.models.common.embeddings import (  # noqa: F401  two from-import what we replace
    rope_utils,
    rotary_pos_embedding,
    yarn_rotary_pos_embedding,
)
from megatron.core.transformer import multi_token_prediction as mtp

from ...layout import make as make_layout
from ...layout.sharding import shard
from ..checks.config import HIDDEN_STATES
from ..patching import Wrap, bound_to, given_to, signature_of
from .cut import BatchCut, cut_of_run, group_of, installed_layout
from .entries import documents_of, entries_to_cut
from .other_cuts import refuse_layout
from .packed import Pack, packs
from .rope import check_length, fused_packed_rope, packed_rope

TENSORS = "tensors"  # parameter of `roll_tensor` of branch dev, which shifts a list of tensors


def rolls_lists() -> bool:
    """Return whether `roll_tensor` of this Megatron shifts a list of tensors."""
    return TENSORS in signature_of(mtp.roll_tensor).parameters


def slicing_patches(layout: str) -> list[Wrap]:
    """Return the wrappers of Megatron's functions that depend on the order of tokens."""
    rotate = rope_utils._apply_rotary_pos_emb_bshd
    rows = [
        Wrap(utils, "get_batch_on_this_cp_rank", ["batch"], partial(_sliced_batch, layout)),
        Wrap(rope_utils, "_apply_rotary_pos_emb_thd", ["t", "cu_seqlens", "freqs", "cp_group"],
             partial(packed_rope, layout, rotate)),
        Wrap(mtp, "roll_tensor", [TENSORS if rolls_lists() else "tensor", "shifts", "dims",
             "cp_group", "packed_seq_params"], partial(_rolled, layout, {})),
    ]  # fmt: skip
    if layout != "zigzag":  # the original supports only zigzag
        names = ["pos_emb", "seq_dim", "cp_group"]
        around = partial(_sliced_rope, layout)
        rows.append(Wrap(rope_utils, "get_pos_emb_on_this_cp_rank", names, around))
    name = "get_thd_batch_on_this_cp_rank"
    if hasattr(utils, name):  # until 0.17; later versions have one function for both
        names = ["batch", "cu_seqlens", "cu_seqlens_padded", "max_seqlen", "cp_size", "cp_rank"]
        rows.append(Wrap(utils, name, names, partial(_sliced_packed_batch, layout)))
    name = "fused_apply_rotary_pos_emb_thd"
    if getattr(rope_utils, name, None) is not None:  # only with Transformer Engine
        names = ["t", "cu_seqlens", "freqs", "cp_size", "cp_rank"]
        rows.append(Wrap(rope_utils, name, names, partial(fused_packed_rope, layout)))
    return rows


def _sliced_batch(layout: str, original: Callable, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Run `megatron.core.utils.get_batch_on_this_cp_rank` (0.16 to 0.20) in the run's layout."""
    arguments = given_to(original, args, kwargs)
    batch, group = arguments["batch"], arguments.get("cp_group")
    documents = documents_of(batch)
    if documents is not None and arguments.get("is_hybrid_cp"):
        cut = _of_own_group(batch, documents, arguments.get("hybrid_cp_group_func"), layout)
        if cut is None and batch.get("cu_seqlens") is not None:
            return original(*args, **kwargs)
        return batch if cut is None else cut  # without cu_seqlens the original would cut the batch
    group = context_group(group)
    if group.size() > 1 and arguments.get("use_contiguous_cp"):  # after 0.20
        refuse_layout(layout, "contiguous", None, "get_batch_on_this_cp_rank of Megatron-Core")
    if group.size() == 1:
        return original(*args, **kwargs)
    if documents is not None:
        return take(batch, documents, cut_of_run(layout), group.size(), group.rank())
    for key, dim in entries_to_cut(batch, packed=False).dims.items():
        batch[key] = _shard(batch[key], layout, group, dim)
    return batch


def _of_own_group(
    batch: dict[str, Any], documents: tuple[Any, Any], group_of_size: Callable | None, layout: str
) -> dict[str, Any] | None:
    """Cut a micro-batch over its own group of `local_cp_size` ranks.

    The replaced function would cut the whole pack in zigzag order, but attention requires that each
    document is cut separately.

    Returns:
        The entries of this rank. None if the group has one rank: the caller then calls the replaced
            function, which cuts nothing and, after Megatron-Core 0.20, makes a group of this rank.
    """
    size = batch.get("local_cp_size")
    if size is None or group_of_size is None:
        raise ValueError(
            "is_hybrid_cp requires local_cp_size in the batch, and the argument "
            "hybrid_cp_group_func of get_batch_on_this_cp_rank, which makes a group of that size"
        )
    if int(size) == 1:
        return None
    group = group_of_size(group_size=int(size))
    cut = cut_of_run(layout)
    return take(batch, documents, cut, group.size(), group.rank()) | {"hybrid_cp_group": group}


def _sliced_packed_batch(
    layout: str, original: Callable, *args: Any, **kwargs: Any
) -> tuple[dict[str, Any], Any]:
    """Run `megatron.core.utils.get_thd_batch_on_this_cp_rank`, which returns (batch, params)."""
    arguments = given_to(original, args, kwargs)
    size, rank = arguments.pop("cp_size", None), arguments.pop("cp_rank", None)
    size = context_group(None).size() if size is None else size
    rank = context_group(None).rank() if rank is None else rank
    batch, params = original(**arguments, cp_size=1, cp_rank=0)
    documents = arguments["cu_seqlens"], arguments["cu_seqlens_padded"]
    if size > 1:
        batch = take(batch, documents, cut_of_run(layout), size, rank)
    return batch, params


def take(
    batch: dict[str, Any], documents: tuple[Any, Any], cut: BatchCut, size: int, rank: int
) -> dict[str, Any]:
    """Cut a packed batch [1, tokens], and return the entries of one rank.

    Args:
        batch: entries by key; changed.
        documents: cumulative lengths without and with padding.
        cut: how the run cuts batches.
        size: number of ranks that hold the batch.
        rank: this rank in the group.
    """
    dims, total = entries_to_cut(batch, packed=True)
    if dims:
        pack = packs().of(total, *documents)
        packs().note_cut(pack)
        for key, dim in dims.items():  # each whole sequence is freed before the next one is cut
            index = pack.index(cut, size, rank, batch[key].device)
            batch[key] = batch[key].index_select(dim, index)
    return batch


def _sliced_rope(
    layout: str, _: Callable, pos_emb: torch.Tensor, seq_dim: int, cp_group: Any = None
) -> torch.Tensor:
    """Run `rope_utils.get_pos_emb_on_this_cp_rank` in the run's layout."""
    if cp_group is None:
        raise ValueError("cp_group is None; pass the context-parallel group of the rank")
    return _shard(pos_emb, layout, cp_group, seq_dim)


def _shard(x: torch.Tensor, layout: str, group: Any, dim: int) -> torch.Tensor:
    size = group.size()
    if size == 1:
        return x
    check_length(x.size(dim), layout, size)
    return shard(x, make_layout(layout, cp_size=size), group.rank(), dim=dim)


def context_group(group: Any = None) -> Any:
    """Return `group` if it is not None, otherwise Megatron's context-parallel group."""
    if group is not None:
        return group
    return parallel_state.get_context_parallel_group()


def shard_sequence(
    x: torch.Tensor, packed_seq_params: Any = None, *, dim: int = 1, group: Any = None
) -> torch.Tensor:
    """Return the tokens of a whole sequence that this rank holds, in the layout of the run.

    Args:
        x: all tokens along `dim`.
        packed_seq_params: a `PackedSeqParams` with the documents; None for one sequence.
        dim: the dimension of tokens.
        group: the context-parallel group; default: the group of `packed_seq_params`, or Megatron's.

    Returns:
        `x` with this rank's tokens along `dim`.

    Raises:
        ValueError: No layout is installed, or the number of tokens does not fit the layout.
    """
    group = sequence_group(group, packed_seq_params)
    index = _order(x.shape[dim], packed_seq_params, group, [group.rank()], cutting=True)
    return x.index_select(dim, index.to(x.device))


def held_positions(rows: int, packed_seq_params: Any = None, group: Any = None) -> np.ndarray:
    """Return the positions of the tokens that `shard_sequence` assigns to each rank.

    Args:
        rows: number of tokens that each rank holds.
        packed_seq_params: same as in `shard_sequence`.
        group: same as in `shard_sequence`.

    Returns:
        int64 [ranks, rows], positions in the whole sequence.
    """
    group = sequence_group(group, packed_seq_params)
    ranks = range(group.size())
    order = _order(rows * len(ranks), packed_seq_params, group, ranks, cutting=False)
    return order.numpy().reshape(len(ranks), rows)


def gather_sequence(
    output: torch.Tensor, packed_seq_params: Any = None, *, dim: int = 0, group: Any = None
) -> torch.Tensor:
    """All-gather the results for all tokens of a sequence, in the order of the sequence.

    This is the inverse of `shard_sequence`. A collective of the group; the result has no gradient.

    Args:
        output: results for this rank's tokens.
        packed_seq_params: same as in `shard_sequence`.
        dim: the dimension of tokens: 0 for activations [t, ...] of a packed batch or [s, b, ...], 1
            for losses [b, s] and logits [b, s, v].
        group: same as in `shard_sequence`.

    Returns:
        `output` with all tokens along `dim`.

    Raises:
        ValueError: The number of tokens does not fit the layout; raised on every rank if all ranks
            have the same number.
    """
    group = sequence_group(group, packed_seq_params)
    size = group.size()
    order = _order(output.shape[dim] * size, packed_seq_params, group, range(size), cutting=False)
    if size == 1:  # the micro-batch may have no process group
        return output.detach()
    own = output.detach().movedim(dim, 0).contiguous()
    parts = [torch.empty_like(own) for _ in range(size)]
    torch.distributed.all_gather(parts, own, group=group)
    index = torch.empty_like(order)
    index[order] = torch.arange(len(order))
    return torch.cat(parts).index_select(0, index.to(own.device)).movedim(0, dim)


def sequence_group(group: Any, params: Any) -> Any:
    """Return `group` if it is not None, otherwise the group that holds the sequence of `params`."""
    return group_of(params, context_group()) if group is None else group


def _order(total: int, params: Any, group: Any, ranks: Any, cutting: bool) -> torch.Tensor:
    """Return the positions of all tokens that `ranks` hold, int64, concatenated in rank order."""
    name, size = installed_layout(), group.size()
    if name is None:
        raise ValueError("no layout is installed: call install() and configure() first")
    if params is None:
        if name == "balanced":
            raise ValueError(
                "layout balanced requires packed_seq_params, which state the documents"
            )
        layout = make_layout(name, cp_size=size)
    else:
        pack = packs().of(total, params.cu_seqlens_q, params.cu_seqlens_q_padded)
        layout = pack.layout(cut_of_run(name), size)
        if cutting:
            packs().note_cut(pack)
    return torch.cat([torch.from_numpy(layout.positions(rank, total)) for rank in ranks])


def _rolled(
    layout: str, unpacked_packs: dict[int, Pack], original: Callable, *args: Any, **kwargs: Any
) -> tuple[Any, torch.Tensor | None] | list[torch.Tensor]:
    """Run `multi_token_prediction.roll_tensor` (0.16 to 0.20) in the run's layout.

    Without context parallelism, call `original`. Hidden states (tensors with gradients) are shifted
    by `original` in a zigzag run without packing, and otherwise refused.

    After 0.20 the original also has the parameters `cp_layout` (the order of the tokens) and
    `fill_value` (the value of tokens without a successor). In branch dev the original shifts a list
    of tensors, has the parameter `fill_values`, and returns a list without sums. The parameter
    `roll_context` of branch dev is not read, because it only replaces communication.

    Args:
        layout: the layout of the run.
        unpacked_packs: cache, by sequence length: a pack with one document for batches without
            `packed_seq_params`.
        original: the replaced function.
        args: positional arguments of `original`.
        kwargs: keyword arguments of `original`.
    """
    bound = bound_to(original, args, kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    tensors = arguments[TENSORS] if TENSORS in arguments else [arguments["tensor"]]
    params, group = arguments["packed_seq_params"], arguments["cp_group"]
    if params is not None and getattr(params, "cp_group", None) is not None:
        group = params.cp_group
    if not tensors or tensors[0] is None or group is None or group.size() == 1:
        return original(*args, **kwargs)
    tensor = tensors[0]
    if arguments.get("cp_layout", "zigzag") != "zigzag":  # "zigzag" is the default
        refuse_layout(layout, arguments["cp_layout"], None, "roll_tensor of multi-token prediction")
    if arguments["shifts"] != -1 or arguments["dims"] not in (-1, tensor.dim() - 1):
        raise ValueError(
            f"roll_tensor with shifts={arguments['shifts']}, dims={arguments['dims']}: over "
            "context-parallel ranks only shifts=-1 along the last dimension is supported"
        )
    if any(part.requires_grad for part in tensors):  # true only for hidden states
        if layout == "zigzag" and params is None:
            return original(*args, **kwargs)
        raise ValueError(f"--mtp-hsm: {HIDDEN_STATES}; remove --mtp-hsm")
    total = tensor.shape[-1] * group.size()
    if params is None:
        pack = unpacked_packs.setdefault(total, Pack(total, (0, total), total, (0, total)))
    else:
        pack = packs().of(total, params.cu_seqlens_q, params.cu_seqlens_q_padded)
    index = pack.successors(cut_of_run(layout), group.size(), group.rank(), tensor.device)
    if TENSORS in arguments:
        fills = arguments.get("fill_values") or [0] * len(tensors)
        pairs = zip(tensors, fills, strict=True)
        return [exchange(part, *index, group, fill) for part, fill in pairs]
    moved = exchange(tensor, *index, group, arguments.get("fill_value", 0))
    return moved, moved.sum() if arguments.get("return_sum", True) else None


def exchange(
    tensor: torch.Tensor, sent: torch.Tensor, taken: torch.Tensor, group: Any, fill: Any = 0
) -> torch.Tensor:
    """Return `tensor` shifted by one token within each document; a collective of `group`.

    Args:
        tensor: [..., s], values of this rank's tokens.
        sent: indices of the tokens to send, the first result of `mb.layout.successors`.
        taken: indices of the next tokens, the second result of `mb.layout.successors`.
        group: the ranks that hold the sequence.
        fill: the value of tokens without a successor.
    """
    own = tensor.index_select(-1, sent)
    received = [torch.empty_like(own) for _ in range(group.size())]
    torch.distributed.all_gather(received, own, group=group)
    last = tensor.new_full((*tensor.shape[:-1], 1), fill)
    return torch.cat([tensor, *received, last], dim=-1).index_select(-1, taken)

# SPDX-License-Identifier: Apache-2.0
"""Slicing, joining and shifting sequences for layouts and packed batches that Megatron lacks.

The functions that return replacements take the place of Megatron's own slicing functions and of the
`roll_tensor` of multi-token prediction, which gives each position the token, position id, label or
loss mask of the next one. `shard_sequence` and `gather_sequence` are for scripts with a data path
of their own, and for looking at outputs. A run has one layout, because Megatron slices batches
before it knows the model, and caches rotary embeddings.

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
from ..patching import Wrap, bound_to, given_to
from .cut import BatchCut, cut_of_run, group_of, installed_layout
from .entries import cut_of, documents_of
from .other_cuts import refuse_layout
from .packed import Pack, packs
from .rope import check_length, fused_packed_rope, packed_rope


def slicing_patches(layout: str) -> list[Wrap]:
    """The functions that depend on the order of tokens in a run of that layout."""
    rotate = rope_utils._apply_rotary_pos_emb_bshd
    rows = [
        Wrap(utils, "get_batch_on_this_cp_rank", ["batch"], partial(_sliced_batch, layout)),
        Wrap(rope_utils, "_apply_rotary_pos_emb_thd", ["t", "cu_seqlens", "freqs", "cp_group"],
             partial(packed_rope, layout, rotate)),
        Wrap(mtp, "roll_tensor", ["tensor", "shifts", "dims", "cp_group", "packed_seq_params"],
             partial(_rolled, layout, {})),
    ]  # fmt: skip
    if layout != "zigzag":  # Megatron's own
        names = ["pos_emb", "seq_dim", "cp_group"]
        around = partial(_sliced_rope, layout)
        rows.append(Wrap(rope_utils, "get_pos_emb_on_this_cp_rank", names, around))
    name = "get_thd_batch_on_this_cp_rank"
    if hasattr(utils, name):  # until 0.17; later versions have one function for both
        names = ["batch", "cu_seqlens", "cu_seqlens_padded", "max_seqlen", "cp_size", "cp_rank"]
        rows.append(Wrap(utils, name, names, partial(_sliced_packed_batch, layout)))
    name = "fused_apply_rotary_pos_emb_thd"
    if getattr(rope_utils, name, None) is not None:  # Transformer Engine is installed
        names = ["t", "cu_seqlens", "freqs", "cp_size", "cp_rank"]
        rows.append(Wrap(rope_utils, name, names, partial(fused_packed_rope, layout)))
    return rows


def _sliced_batch(layout: str, original: Callable, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """`megatron.core.utils.get_batch_on_this_cp_rank` (0.16 to 0.20)."""
    given = given_to(original, args, kwargs)
    batch, group = given["batch"], given.get("cp_group")
    documents = documents_of(batch)
    if documents is not None and given.get("is_hybrid_cp"):
        cut = _of_own_group(batch, documents, given.get("hybrid_cp_group_func"), layout)
        if cut is None and batch.get("cu_seqlens") is not None:
            return original(*args, **kwargs)
        return batch if cut is None else cut  # without cu_seqlens the original cuts the batch
    group = context_group(group)
    if group.size() > 1 and given.get("use_contiguous_cp"):  # after 0.20
        refuse_layout(layout, "contiguous", None, "get_batch_on_this_cp_rank of Megatron-Core")
    if group.size() == 1:
        return original(*args, **kwargs)
    if documents is not None:
        return take(batch, documents, cut_of_run(layout), group.size(), group.rank())
    for key, dim in cut_of(batch, packed=False).dims.items():
        batch[key] = _shard(batch[key], layout, group, dim)
    return batch


def _of_own_group(
    batch: dict[str, Any], documents: tuple[Any, Any], group_of_size: Callable | None, layout: str
) -> dict[str, Any] | None:
    """Return the part of a micro-batch that has a group of its own, of `local_cp_size` ranks.

    The original cuts the whole pack in zigzag order, attention every document. None for one rank:
    the original cuts nothing, and after 0.20 it names the group of this rank alone.
    """
    size = batch.get("local_cp_size")
    if size is None or group_of_size is None:
        raise ValueError(
            "is_hybrid_cp: the batch needs local_cp_size, and get_batch_on_this_cp_rank needs "
            "hybrid_cp_group_func, which makes a group of it"
        )
    if int(size) == 1:
        return None
    group = group_of_size(group_size=int(size))
    cut = cut_of_run(layout)
    return take(batch, documents, cut, group.size(), group.rank()) | {"hybrid_cp_group": group}


def _sliced_packed_batch(
    layout: str, original: Callable, *args: Any, **kwargs: Any
) -> tuple[dict[str, Any], Any]:
    """`megatron.core.utils.get_thd_batch_on_this_cp_rank`: (batch, params)."""
    given = given_to(original, args, kwargs)
    size, rank = given.pop("cp_size", None), given.pop("cp_rank", None)
    size = context_group(None).size() if size is None else size
    rank = context_group(None).rank() if rank is None else rank
    batch, params = original(**given, cp_size=1, cp_rank=0)
    documents = given["cu_seqlens"], given["cu_seqlens_padded"]
    if size > 1:
        batch = take(batch, documents, cut_of_run(layout), size, rank)
    return batch, params


def take(
    batch: dict[str, Any], documents: tuple[Any, Any], cut: BatchCut, size: int, rank: int
) -> dict[str, Any]:
    """The part of a packed batch [1, tokens] that `rank` of `size` ranks holds."""
    dims, total = cut_of(batch, packed=True)
    if dims:
        pack = packs().of(total, *documents)
        packs().note_cut(pack)
        for key, dim in dims.items():  # each whole sequence is gone before the next one is cut
            index = pack.index(cut, size, rank, batch[key].device)
            batch[key] = batch[key].index_select(dim, index)
    return batch


def _sliced_rope(
    layout: str, _: Callable, pos_emb: torch.Tensor, seq_dim: int, cp_group: Any = None
) -> torch.Tensor:
    """`rope_utils.get_pos_emb_on_this_cp_rank`."""
    if cp_group is None:
        raise ValueError("cp_group is None: positions per rank need the group of the rank")
    return _shard(pos_emb, layout, cp_group, seq_dim)


def _shard(x: torch.Tensor, layout: str, group: Any, dim: int) -> torch.Tensor:
    size = group.size()
    if size == 1:
        return x
    check_length(x.size(dim), layout, size)
    return shard(x, make_layout(layout, cp_size=size), group.rank(), dim=dim)


def context_group(group: Any = None) -> Any:
    """`group`, or the context-parallel group of this process."""
    if group is not None:
        return group
    return parallel_state.get_context_parallel_group()


def shard_sequence(
    x: torch.Tensor, packed_seq_params: Any = None, *, dim: int = 1, group: Any = None
) -> torch.Tensor:
    """The tokens of a whole sequence that this rank holds, in the layout of the run.

    x: all tokens along `dim`. packed_seq_params: a `PackedSeqParams` that says where documents
    end; None for one sequence. group: the context-parallel group, by default Megatron's, or that of
    `packed_seq_params`. Raises `ValueError` without `install`, and where the tokens do not
    divide as the layout needs.
    """
    group = sequence_group(group, packed_seq_params)
    index = _order(x.shape[dim], packed_seq_params, group, [group.rank()], cutting=True)
    return x.index_select(dim, index.to(x.device))


def held_positions(rows: int, packed_seq_params: Any = None, group: Any = None) -> np.ndarray:
    """int64 [ranks, rows]: the positions in the whole sequence of the tokens that `shard_sequence`
    leaves to each rank of the group, of which each holds so many rows.
    """
    group = sequence_group(group, packed_seq_params)
    ranks = range(group.size())
    order = _order(rows * len(ranks), packed_seq_params, group, ranks, cutting=False)
    return order.numpy().reshape(len(ranks), rows)


def gather_sequence(
    output: torch.Tensor, packed_seq_params: Any = None, *, dim: int = 0, group: Any = None
) -> torch.Tensor:
    """All tokens of a sequence in their order, on every rank, from the part of each rank.

    output: what this rank computed for its tokens, which lie along `dim`: 0 for activations
    [t, ...] of a packed batch or [s, b, ...], 1 for losses [b, s] and logits [b, s, v].
    packed_seq_params and group: as of `shard_sequence`, which this undoes. Has no gradient. A
    collective of the group: raises `ValueError` where the tokens do not divide, on every rank if
    all have the same number.
    """
    group = sequence_group(group, packed_seq_params)
    size = group.size()
    order = _order(output.shape[dim] * size, packed_seq_params, group, range(size), cutting=False)
    if size == 1:  # perhaps a micro-batch that has no process group
        return output.detach()
    own = output.detach().movedim(dim, 0).contiguous()
    parts = [torch.empty_like(own) for _ in range(size)]
    torch.distributed.all_gather(parts, own, group=group)
    index = torch.empty_like(order)
    index[order] = torch.arange(len(order))
    return torch.cat(parts).index_select(0, index.to(own.device)).movedim(0, dim)


def sequence_group(group: Any, params: Any) -> Any:
    """`group`, or the ranks that share the sequences of `params`."""
    return group_of(params, context_group()) if group is None else group


def _order(total: int, params: Any, group: Any, ranks: Any, cutting: bool) -> torch.Tensor:
    """int64: the positions that these ranks hold, rank after rank."""
    name, size = installed_layout(), group.size()
    if name is None:
        raise ValueError("no layout is installed: call install() and configure() first")
    if params is None:
        if name == "balanced":
            raise ValueError("layout balanced: give packed_seq_params, which name the documents")
        layout = make_layout(name, cp_size=size)
    else:
        pack = packs().of(total, params.cu_seqlens_q, params.cu_seqlens_q_padded)
        layout = pack.layout(cut_of_run(name), size)
        if cutting:
            packs().note_cut(pack)
    return torch.cat([torch.from_numpy(layout.positions(rank, total)) for rank in ranks])


def _rolled(
    layout: str, whole: dict[int, Pack], original: Callable, *args: Any, **kwargs: Any
) -> tuple[Any, torch.Tensor | None]:
    """`multi_token_prediction.roll_tensor` (0.16 to 0.20) in a run of that layout.

    The original runs without context parallelism, and for hidden states, which have gradients.
    whole: sequences that are not packed, by their lengths. After 0.20 the original also takes
    `cp_layout`, the order of the tokens, and `fill_value` for tokens without a next one.
    """
    bound = bound_to(original, args, kwargs)
    bound.apply_defaults()
    given = bound.arguments
    tensor, params, group = given["tensor"], given["packed_seq_params"], given["cp_group"]
    if params is not None and getattr(params, "cp_group", None) is not None:
        group = params.cp_group
    if tensor is None or group is None or group.size() == 1:
        return original(*args, **kwargs)
    if given.get("cp_layout", "zigzag") != "zigzag":  # its default
        refuse_layout(layout, given["cp_layout"], None, "roll_tensor of multi-token prediction")
    if given["shifts"] != -1 or given["dims"] not in (-1, tensor.dim() - 1):
        raise ValueError(
            f"roll_tensor with shifts={given['shifts']}, dims={given['dims']}: over "
            "context-parallel ranks only the last dimension shifts, to the left by one token"
        )
    if tensor.requires_grad:  # hidden states that are mixed
        if layout == "zigzag" and params is None:
            return original(*args, **kwargs)
        raise ValueError(f"--mtp-hsm: {HIDDEN_STATES}")
    total = tensor.shape[-1] * group.size()
    if params is None:
        pack = whole.setdefault(total, Pack(total, (0, total), total, (0, total)))
    else:
        pack = packs().of(total, params.cu_seqlens_q, params.cu_seqlens_q_padded)
    index = pack.successors(cut_of_run(layout), group.size(), group.rank(), tensor.device)
    moved = exchange(tensor, *index, group, given.get("fill_value", 0))
    return moved, moved.sum() if given.get("return_sum", True) else None


def exchange(
    tensor: torch.Tensor, sent: torch.Tensor, taken: torch.Tensor, group: Any, fill: Any = 0
) -> torch.Tensor:
    """Return `tensor` [..., s] of this rank, shifted by `mb.layout.successors`.

    A collective of `group`. fill: the value of tokens without a successor.
    """
    own = tensor.index_select(-1, sent)
    received = [torch.empty_like(own) for _ in range(group.size())]
    torch.distributed.all_gather(received, own, group=group)
    last = tensor.new_full((*tensor.shape[:-1], 1), fill)
    return torch.cat([tensor, *received, last], dim=-1).index_select(-1, taken)

"""Shifting a sequence by one token over context-parallel ranks, for multi-token prediction.

Megatron's ``roll_tensor`` gives each position the token, position id, label or loss mask of the
next one. Over ranks it knows only zigzag shards. The replacement here asks the layout of the batch,
packed or not, where the next token of each row is. Ranks exchange the first row of each run of
neighbours: two rows per rank for zigzag, one per piece of a document, all for striped.

Shape letters: s tokens of this context-parallel rank.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from megatron_burst.megatron.checks.model import HIDDEN_STATES
from megatron_burst.megatron.data.cut import cut_of_run
from megatron_burst.megatron.data.packed import Pack, packs
from megatron_burst.megatron.patching.compatibility import require_parameters


def roll(original: Callable, layout: str) -> Callable:
    """A replacement for ``multi_token_prediction.roll_tensor`` (0.16 to 0.20) in a run of that
    layout.

    The original runs without context parallelism, and for hidden states, which have gradients.
    """
    names = ["tensor", "shifts", "dims", "cp_group", "packed_seq_params"]
    require_parameters(original, names, "multi_token_prediction.roll_tensor")
    signature = inspect.signature(original)
    whole: dict[int, Pack] = {}  # sequences that are not packed, by their lengths

    @functools.wraps(original)
    def roll_tensor(*args: Any, **kwargs: Any) -> tuple[Any, torch.Tensor | None]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        tensor, params, group = given["tensor"], given["packed_seq_params"], given["cp_group"]
        if params is not None and getattr(params, "cp_group", None) is not None:
            group = params.cp_group
        if tensor is None or group is None or group.size() == 1:
            return original(*args, **kwargs)
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
        moved = exchange(tensor, *index, group)
        return moved, moved.sum() if given.get("return_sum", True) else None

    return roll_tensor


def exchange(
    tensor: torch.Tensor, sent: torch.Tensor, taken: torch.Tensor, group: Any
) -> torch.Tensor:
    """``tensor`` [..., s] of this rank, shifted by `mb.layout.successors`; a collective of
    ``group``."""
    mine = tensor.index_select(-1, sent)
    received = [torch.empty_like(mine) for _ in range(group.size())]
    torch.distributed.all_gather(received, mine, group=group)
    zero = tensor.new_zeros(*tensor.shape[:-1], 1)
    return torch.cat([tensor, *received, zero], dim=-1).index_select(-1, taken)

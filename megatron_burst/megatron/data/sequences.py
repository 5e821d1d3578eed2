"""Whole sequences and the parts of them that ranks hold: cutting them, and joining them again.

For scripts with a data path of their own, and for looking at outputs. Megatron's own training
scripts need neither: their slicing functions are replaced (`slicing`).
"""

from __future__ import annotations

from typing import Any

import torch

import megatron_burst as mb
from megatron_burst.megatron.attention.micro_batch import group_of
from megatron_burst.megatron.data.cut import cut_of_run
from megatron_burst.megatron.data.packed import packs
from megatron_burst.megatron.data.slicing import context_group
from megatron_burst.megatron.install import installed_layout


def shard_sequence(
    x: torch.Tensor, packed_seq_params: Any = None, *, dim: int = 1, group: Any = None
) -> torch.Tensor:
    """The tokens of a whole sequence that this rank holds, in the layout of the run.

    x: all tokens along ``dim``. packed_seq_params: a ``PackedSeqParams`` that says where documents
    end; None for one sequence. group: the context-parallel group, by default Megatron's, or that of
    ``packed_seq_params``. Raises ``ValueError`` without `install`, and where the tokens do not
    divide as the layout needs.
    """
    group = _group(group, packed_seq_params)
    index = _order(x.shape[dim], packed_seq_params, group, [group.rank()], cutting=True)
    return x.index_select(dim, index.to(x.device))


def gather_sequence(
    output: torch.Tensor, packed_seq_params: Any = None, *, dim: int = 0, group: Any = None
) -> torch.Tensor:
    """All tokens of a sequence in their order, on every rank, from the part of each rank.

    output: what this rank computed for its tokens, which lie along ``dim``: 0 for activations
    [t, ...] of a packed batch or [s, b, ...], 1 for losses [b, s] and logits [b, s, v].
    packed_seq_params and group: as of `shard_sequence`, which this undoes. Has no gradient. A
    collective of the group: raises ``ValueError`` where the tokens do not divide, on every rank if
    all have the same number.
    """
    group = _group(group, packed_seq_params)
    size = group.size()
    order = _order(output.shape[dim] * size, packed_seq_params, group, range(size), cutting=False)
    if size == 1:  # perhaps a micro-batch that has no process group
        return output.detach()
    mine = output.detach().movedim(dim, 0).contiguous()
    parts = [torch.empty_like(mine) for _ in range(size)]
    torch.distributed.all_gather(parts, mine, group=group)
    index = torch.empty_like(order)
    index[order] = torch.arange(len(order))
    return torch.cat(parts).index_select(0, index.to(mine.device)).movedim(0, dim)


def _group(group: Any, params: Any) -> Any:
    return group_of(params, context_group()) if group is None else group


def _order(total: int, params: Any, group: Any, ranks: Any, cutting: bool) -> torch.Tensor:
    """int64: the positions that these ranks hold, rank after rank."""
    name, size = installed_layout(), group.size()
    if name is None:
        raise ValueError("no layout is installed: call install() and configure() first")
    if params is None:
        if name == "balanced":
            raise ValueError("layout balanced: give packed_seq_params, which name the documents")
        layout = mb.layout.make(name, cp_size=size)
    else:
        pack = packs().of(total, params.cu_seqlens_q, params.cu_seqlens_q_padded)
        layout = pack.layout(cut_of_run(name), size)
        if cutting:
            packs().note_cut(pack)
    return torch.cat([torch.from_numpy(layout.positions(rank, total)) for rank in ranks])

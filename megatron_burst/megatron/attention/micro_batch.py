"""The context-parallel group of one micro-batch: hybrid or dynamic context parallelism.

Megatron's schedulers give short documents to few ranks and long ones to many: the
``PackedSeqParams`` of a micro-batch names the group that holds it (``cp_group``) or says that one
rank holds all of it (``local_cp_size`` 1 without a group). Attention, rotary embedding and data
path ask this module, so that they cannot disagree.
"""

from __future__ import annotations

from typing import Any

import torch


class OneRank:
    """What is asked of a process group, for a micro-batch that one rank holds alone."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


ONE_RANK = OneRank()


def group_of(params: Any, static: Any) -> Any:
    """The group that holds the micro-batch of a ``PackedSeqParams``: its own, or else ``static``.

    `ONE_RANK` if no other rank holds any of it. params: None for a batch that is not packed.
    """
    group, size = getattr(params, "cp_group", None), getattr(params, "local_cp_size", None)
    if group is None and size in (None, static.size()):
        return static
    if group is None and size == 1:
        return ONE_RANK
    if group is None:
        raise ValueError(
            f"packed_seq_params: local_cp_size is {size} and cp_group None: name the group of the "
            f"ranks that hold the micro-batch"
        )
    if size not in (None, group.size()):
        raise ValueError(
            f"packed_seq_params: local_cp_size is {size}, and cp_group has {group.size()} ranks"
        )
    if group.size() > 1 and not isinstance(group, torch.distributed.ProcessGroup):
        raise ValueError(
            f"packed_seq_params: cp_group must be a process group that this rank is in, got "
            f"{group!r:.100}"
        )
    return ONE_RANK if group.size() == 1 else group


def ranks_of(group: Any) -> tuple[int, ...]:
    """The global ranks of a group, in its order."""
    if group is ONE_RANK:
        return (torch.distributed.get_rank(),)
    return tuple(torch.distributed.get_process_group_ranks(group))

# SPDX-License-Identifier: Apache-2.0
"""Broadcast of the next micro-batch's documents from tensor-parallel rank 0.

In Megatron-LM only tensor-parallel rank 0 has a data loader. Since Megatron-Core 0.18
`get_batch_on_this_tp_rank` broadcasts each batch to the other ranks of the tensor-parallel group.
These ranks do not have the next batch, so their threads could not make its plans in advance. All
ranks of the group compute each layer together and would wait for these plans. Therefore rank 0 also
broadcasts the documents of the batch that it has read ahead (`loader.BatchIterator`). The other
ranks start a copy to the host, for which only their planning thread waits.

Either all ranks of the group take part in the broadcast or none does. The decision depends on the
configuration of the model and on arguments of `get_batch_on_this_tp_rank`, which are the same on
all ranks of the group. It does not depend on data: the message has a fixed size, and the first
number is 0 if there is no next batch (in the last micro-batch of a step, or if the script does not
read from Megatron's data iterator) or if the documents do not fit.

Megatron-Core 0.16 and 0.17 have another function of this name in `megatron.training`, which is not
wrapped: the forward of the other ranks makes their plans. With packed batches and tensor
parallelism, ranks of 0.16 disagree on the number of broadcasts (`max_seqlen`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import utils

from ...comm.process_groups import backends
from ...layout.sharding import to_device
from .. import patching
from .packed import Pack, packs

CAPACITY = 8192  # int32 numbers in a message; enough for 2,000 documents with padding
_NAME = "get_batch_on_this_tp_rank"
_PACKED = ("has_cu_seqlens", "is_sft")  # the parameter from 0.19 on, and in 0.18


def patch(patches: patching.PatchSet) -> None:
    """Wrap `megatron.core.utils.get_batch_on_this_tp_rank`, if this Megatron has it."""
    if hasattr(utils, _NAME):
        names = ["batch", "is_hybrid_cp", "broadcast_src_rank", "broadcast_group", "tp_rank"]
        patches.wrap(utils, _NAME, names, _with_next_pack)


def _with_next_pack(original: Callable, *args: Any, **named: Any) -> Any:
    """Run `get_batch_on_this_tp_rank`, then broadcast the documents of the next batch."""
    batch = original(*args, **named)
    state = patching.run_state()
    pack, state.next_pack = state.next_pack, None
    arguments = patching.given_to(original, args, named)
    group = arguments["broadcast_group"]
    packed = any(arguments.get(name) for name in _PACKED) and not arguments["is_hybrid_cp"]
    if state.shares_packs and packed and group.size() > 1:
        device, source = _device(group), arguments["broadcast_src_rank"]
        if arguments["tp_rank"] == 0:
            dist.broadcast(to_device(encoded(pack), device), source, group=group)
        else:
            message = torch.empty(CAPACITY, dtype=torch.int32, device=device)
            dist.broadcast(message, source, group=group)
            receive = partial(_receive, *_to_host(message))
            for book in state.plan_books.values():
                book.ahead.collect()
            for book in state.plan_books.values():
                book.plan_received(receive)
    return batch


def _device(group: Any) -> torch.device:
    """Return the device of the group's broadcasts."""
    on_gpu = "cuda" in backends(group)
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _to_host(message: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """Start a copy to the host; return the copy, and the event after which it is complete."""
    if message.device.type == "cpu":
        return message, None
    host = message.to("cpu", non_blocking=True)  # torch allocates pinned memory
    ready = torch.cuda.Event(blocking=True)  # the thread that waits for it sleeps
    ready.record(torch.cuda.current_stream(message.device))
    return host, ready


def _receive(host: torch.Tensor, ready: torch.cuda.Event | None) -> Pack | None:
    """Return the pack of a message after its copy to the host; called by the planning thread."""
    if ready is not None:
        with torch.cuda.device(ready.device):  # no context on the thread's default device
            ready.synchronize()
    pack = decoded(host.numpy())
    if pack is not None:
        packs().share_cut(pack)
    return pack


def encoded(pack: Pack | None) -> np.ndarray:
    """Return the message of a pack, int32 [CAPACITY]; zeros for None or a pack that does not fit.

    The numbers are: total, end, the lengths of three lists, and the lists (bounds, documents,
    padding).
    """
    message = np.zeros(CAPACITY, dtype=np.int32)
    if pack is not None and pack.spans is None:
        lists = pack.bounds, pack.documents, pack.padding
        numbers = [pack.total, pack.end, *map(len, lists), *(x for part in lists for x in part)]
        if len(numbers) <= CAPACITY:
            message[: len(numbers)] = numbers
    return message


def decoded(message: np.ndarray) -> Pack | None:
    """Return the pack of a message (see `encoded`), or None."""
    total, end, *counts = message[:5].tolist()
    stops = 5 + np.cumsum(counts)
    bounds, documents, padding = (
        tuple(message[stop - count : stop].tolist())
        for stop, count in zip(stops, counts, strict=True)
    )
    return Pack(total, bounds, end, documents, padding) if total else None

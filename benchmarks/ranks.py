"""Gloo ranks on this machine, in their own processes, for one measurement."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def on_ranks(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Return `function(*args)` of each of `size` ranks of the default group, one thread each."""
    results = mp.get_context("spawn").SimpleQueue()
    port = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port
    mp.spawn(_rank, (size, port, results, function, args), nprocs=size)
    result_of_rank = dict(results.get() for _ in range(size))
    return [result_of_rank[rank] for rank in range(size)]


def _rank(
    rank: int, size: int, port: int, results: Any, function: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    # Megatron reads these variables, and its CPU replacements do not support compiled functions.
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size}
    os.environ |= {"TORCHDYNAMO_DISABLE": "1"} | {name: str(x) for name, x in ranks.items()}
    store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    results.put((rank, function(*args)))
    dist.barrier()
    dist.destroy_process_group()

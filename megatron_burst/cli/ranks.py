# SPDX-License-Identifier: Apache-2.0
"""A command on several ranks: one report of an error that all of them raise, and a clean end.

Ranks are those of the launcher (torchrun, srun), which sets RANK, WORLD_SIZE and where they meet.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

PATIENCE = timedelta(seconds=5)  # for ranks that raised no error yet
MOMENT = timedelta(seconds=1)


def report(prefix: str, error: BaseException) -> None:
    """Print an error, once and as one of all ranks if all of them report the same within 5 s."""
    rank, world = (
        int(os.environ.get(name, count)) for name, count in (("RANK", "0"), ("WORLD_SIZE", "1"))
    )
    said = f"{prefix}: error: {error}"
    if world == 1 or not _shared(rank, world, said):
        print(said, file=sys.stderr, flush=True)


def _shared(rank: int, world: int, said: str) -> bool:
    """Whether rank 0 has printed this error for all ranks; False where they differ or do not meet.

    Nobody ends before all know: a launcher ends the other ranks when it sees the first one fail.
    """
    run = f"burst-error/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    texts, verdict = [f"{run}/{each}" for each in range(world)], f"{run}/verdict"
    printed = False
    try:
        store = _store(rank)
        store.set(texts[rank], said)
        if rank > 0:
            store.wait([verdict], 2 * PATIENCE)
            printed = store.get(verdict) == b"same"
            store.set(f"{texts[rank]}/read", "")
            return printed
        if _all_say(store, texts, said):
            print(
                said.replace(": error: ", ": error (all ranks): ", 1), file=sys.stderr, flush=True
            )
            printed = True
        store.set(verdict, "same" if printed else "differ")
        store.wait([f"{text}/read" for text in texts[1:]], PATIENCE if printed else MOMENT)
    except (RuntimeError, ValueError, KeyError, OSError):  # of torch.distributed, or no launcher
        pass
    return printed


def _all_say(store: Any, texts: list[str], said: str) -> bool:
    try:
        store.wait(texts, PATIENCE)
    except RuntimeError:
        return False
    return all(store.get(text) == said.encode() for text in texts)


def _store(rank: int) -> Any:
    """Where the ranks meet: that of their process group, or of the launcher; else rank 0 opens one
    where its process group would be.
    """
    import torch.distributed as dist  # takes seconds

    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    opens = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=opens, timeout=PATIENCE, wait_for_workers=False)


@contextmanager
def groups_ended() -> Iterator[None]:
    """Around a program: at its normal end its process groups are destroyed, or threads of theirs
    may abort the process while Python ends, and the exit code would be that of a crash.
    """
    try:
        yield
    except SystemExit as end:
        if not end.code:
            _destroy_groups()
        raise
    _destroy_groups()


def _destroy_groups() -> None:
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return
    # A group's threads end only with its last reference. Models have reference cycles, and Megatron
    # has module variables, of which destroy_model_parallel resets most.
    megatron = sys.modules.get("megatron.core.parallel_state")
    if megatron is not None:
        megatron.destroy_model_parallel()
        for name, value in list(vars(megatron).items()):
            if any(isinstance(group, dist.ProcessGroup) for group in _items(value)):
                setattr(megatron, name, {} if isinstance(value, dict) else None)
    gc.collect()
    dist.destroy_process_group()


def _items(value: Any) -> Sequence[Any]:
    if isinstance(value, dict):  # groups of hybrid context parallelism, by their sizes
        return list(value.values())
    return value if isinstance(value, (list, tuple)) else [value]

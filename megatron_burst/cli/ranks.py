# SPDX-License-Identifier: Apache-2.0
"""Error messages and exit of commands that run on several ranks.

An error that all ranks have is printed once. Process groups are destroyed at exit. The launcher
(torchrun, srun) starts the ranks and sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

PATIENCE = timedelta(seconds=5)  # wait for errors of other ranks
MOMENT = timedelta(seconds=1)  # wait until other ranks have read that errors differ


def report(prefix: str, error: BaseException) -> None:
    """Print "PREFIX: error: ERROR"; only on rank 0 if all ranks report it within 5 s."""
    rank, world = (
        int(os.environ.get(name, count)) for name, count in (("RANK", "0"), ("WORLD_SIZE", "1"))
    )
    message = f"{prefix}: error: {error}"
    if world == 1 or not _shared(rank, world, message):
        print(message, file=sys.stderr, flush=True)


def _shared(rank: int, world: int, message: str) -> bool:
    """Return True if rank 0 printed this error for all ranks.

    Returns False if errors differ or the store cannot be reached. Ranks wait until all of them have
    read the result, because a launcher kills the other ranks when the first rank exits.
    """
    run = f"burst-error/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    texts, verdict = [f"{run}/{other_rank}" for other_rank in range(world)], f"{run}/verdict"
    printed = False
    try:
        store = _store(rank)
        store.set(texts[rank], message)
        if rank > 0:
            store.wait([verdict], 2 * PATIENCE)
            printed = store.get(verdict) == b"same"
            store.set(f"{texts[rank]}/read", "")
            return printed
        if _all_report(store, texts, message):
            print(
                message.replace(": error: ", ": error (all ranks): ", 1),
                file=sys.stderr,
                flush=True,
            )
            printed = True
        store.set(verdict, "same" if printed else "differ")
        store.wait([f"{text}/read" for text in texts[1:]], PATIENCE if printed else MOMENT)
    except (RuntimeError, ValueError, KeyError, OSError):  # store error, or no launcher
        pass
    return printed


def _all_report(store: Any, texts: list[str], message: str) -> bool:
    try:
        store.wait(texts, PATIENCE)
    except RuntimeError:
        return False
    return all(store.get(text) == message.encode() for text in texts)


def _store(rank: int) -> Any:
    """Return the torch.distributed store that all ranks share.

    It is the store of the default process group, if that exists, or of the launcher. Otherwise rank
    0 opens a store at MASTER_ADDR and MASTER_PORT.
    """
    import torch.distributed as dist  # takes seconds

    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    opens = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=opens, timeout=PATIENCE, wait_for_workers=False)


@contextmanager
def groups_ended() -> Iterator[None]:
    """Return a context manager that destroys all process groups when its block ends normally.

    Threads of remaining process groups may abort the process while Python exits. The exit status
    would then be the status of a crash.
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
    # The threads of a group end only when the last reference to the group is dropped. Models have
    # reference cycles. Megatron references groups in module variables; destroy_model_parallel
    # resets most of them.
    megatron = sys.modules.get("megatron.core.parallel_state")
    if megatron is not None:
        megatron.destroy_model_parallel()
        for name, value in list(vars(megatron).items()):
            if any(isinstance(group, dist.ProcessGroup) for group in _items(value)):
                setattr(megatron, name, {} if isinstance(value, dict) else None)
    gc.collect()
    dist.destroy_process_group()


def _items(value: Any) -> Sequence[Any]:
    if isinstance(value, dict):  # groups of hybrid context parallelism, by size
        return list(value.values())
    return value if isinstance(value, (list, tuple)) else [value]

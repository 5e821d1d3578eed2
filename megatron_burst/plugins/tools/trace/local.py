# SPDX-License-Identifier: Apache-2.0
"""Trace of one attention call on ranks of this machine, with gloo on a CPU or NCCL on GPUs.

Events have the same order as in training. On a CPU, transfers use the loopback device, so their
durations differ from durations on a network.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessRaisedException, start_processes
from torch.profiler import ProfilerActivity, profile, record_function

from ....attention import attention
from ....comm.groups import Groups
from ....planning.prepare import prepare
from ....units import duration, grid_of
from .record import PASS, Trace, load


def title(call: Namespace) -> str:
    """Return the title of the picture: a description of the attention call."""
    chunks = f", {call.head_chunks} head chunks" if call.head_chunks > 1 else ""
    device = " (CPU, loopback)" if call.device == "cpu" else ""
    return (
        f"{call.algorithm}, {grid_of(call.per_node, call.nodes)}, {call.tokens} tokens "
        f"per rank, {call.heads} heads ({call.kv_heads} for keys) of {call.width}{chunks}{device}"
    )


@contextmanager
def profiled(path: Path) -> Iterator[None]:
    """Run torch's profiler in this context. Then write a file that `record.load` can read."""
    kinds = [ProfilerActivity.CPU]
    kinds += [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    with profile(activities=kinds) as recorded:
        yield
    recorded.export_chrome_trace(str(path))


def run(call: Namespace, limit: float = 120.0) -> Trace:
    """Start the ranks, run the attention call twice, and return the trace of the second call.

    Args:
        call: Flags of the command.
        limit: Time limit in seconds.

    Raises:
        ValueError: A rank fails, or does not end within the limit.
    """
    ranks = call.nodes * call.per_node
    if call.device == "cuda" and torch.cuda.device_count() < ranks:
        raise ValueError(
            f"--device cuda: {ranks} ranks require {ranks} GPUs, and torch finds "
            f"{torch.cuda.device_count()}; use fewer ranks or --device cpu"
        )
    multiprocessing.set_forkserver_preload(["torch"])  # import torch once for all ranks
    with tempfile.TemporaryDirectory(prefix="trace-") as folder:
        processes = start_processes(
            _rank, (call, Path(folder)), ranks, join=False, start_method="forkserver"
        )
        assert processes is not None  # with join=False
        ends = time.monotonic() + limit
        try:
            while not processes.join(max(0.0, ends - time.monotonic())):
                if time.monotonic() >= ends:
                    raise ValueError(
                        f"the ranks did not end within {duration(limit)}; use fewer ranks or tokens"
                    )
        except ProcessRaisedException as error:
            raise ValueError(str(error).strip().splitlines()[-1]) from error
        finally:
            for process in filter(None, processes.processes):
                process.kill()
                process.join()
        return replace(load(sorted(Path(folder).glob("*.json"))), title=title(call))


def _rank(rank: int, call: Namespace, folder: Path) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if call.device == "cuda" else torch.device("cpu")
    if call.device == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if call.device == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=f"file://{folder / 'store'}", rank=rank,
        world_size=call.nodes * call.per_node, timeout=timedelta(seconds=60),
    )  # fmt: skip
    _trace(call, device, folder / f"{rank:04}.json")
    dist.barrier()
    dist.destroy_process_group()


def _trace(call: Namespace, device: torch.device, path: Path) -> None:
    world = dist.group.WORLD
    assert world is not None
    groups = Groups.from_topology(world, intra=call.per_node)
    torch.manual_seed(groups.rank)
    q, k, v = (
        torch.randn(call.tokens, 1, heads, call.width, device=device, requires_grad=True)
        for heads in (call.heads, call.kv_heads, call.kv_heads)
    )
    plan = prepare(
        q, k, v, groups=groups, algorithm=call.algorithm, side=call.side,
        head_chunks=call.head_chunks,
    )  # fmt: skip
    attention(q, k, v, plan=plan).sum().backward()  # warm-up: the first exchange opens connections
    with profiled(path):
        dist.barrier()
        with _marked_pass("forward", device):
            out = attention(q, k, v, plan=plan)
        dist.barrier()
        with _marked_pass("backward", device):
            out.backward(torch.ones_like(out))


@contextmanager
def _marked_pass(name: str, device: torch.device) -> Iterator[None]:
    with record_function(f"{PASS}{name}"):
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)

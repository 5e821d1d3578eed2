"""The trace of one attention call on gloo ranks of this machine.

It shows the real order of events. Their durations are those of the loopback device, which is no
network; `benchmarks/cluster` emulates links, and writes the same files.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ...attention import attention
from ...comm.groups import Groups
from ...options import SideName
from ...planning.prepare import prepare
from .files import Trace
from .record import Event, traced

Mark = tuple[str, float, float]


@dataclass(frozen=True)
class Call:
    """One call of attention: causal, fp32, batch 1, zigzag."""

    nodes: int
    per_node: int
    algorithm: str
    side: SideName
    tokens: int  # per rank
    heads: int
    kv_heads: int
    width: int
    head_chunks: int

    @property
    def title(self) -> str:
        chunks = f", {self.head_chunks} head chunks" * (self.head_chunks > 1)
        return (
            f"{self.algorithm}, {self.nodes} nodes x {self.per_node} ranks, {self.tokens} tokens "
            f"per rank, {self.heads} heads ({self.kv_heads} for keys) of {self.width}{chunks}"
        )


def run(call: Call, limit: float = 120.0) -> Trace:
    """Start the ranks, run the call twice and trace the second run.

    Raises ValueError if a rank raises an error, or does not answer within `limit` seconds.
    """
    context = multiprocessing.get_context("forkserver")  # so torch is imported once
    context.set_forkserver_preload(["torch"])
    with tempfile.TemporaryDirectory(prefix="trace-") as folder:
        pipes, processes = [], []
        for rank in range(call.nodes * call.per_node):
            here, there = context.Pipe()
            process = context.Process(
                target=_rank, args=(rank, call, Path(folder) / "store", there), daemon=True
            )
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        try:
            answers = [_answer(pipe, rank, limit) for rank, pipe in enumerate(pipes)]
        finally:
            for process in processes:
                process.kill()
                process.join()
    events = [event for some, _ in answers for event in some]
    marks = zip(*(marks for _, marks in answers), strict=True)
    whole = [(m[0][0], min(x[1] for x in m), max(x[2] for x in m)) for m in marks]
    return Trace(call.title, tuple(events), tuple(whole))


def _answer(pipe, rank: int, limit: float) -> tuple[list[Event], list[Mark]]:
    if not pipe.poll(limit):
        raise ValueError(f"rank {rank} did not answer within {limit:.0f} s")
    good, value = pipe.recv()
    if not good:
        raise ValueError(value)
    return value


def _rank(rank: int, call: Call, store: Path, pipe) -> None:
    torch.set_num_threads(1)
    size = call.nodes * call.per_node
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    try:
        pipe.send((True, _trace(rank, call)))
    except Exception as error:
        pipe.send((False, str(error)))
    os._exit(0)


def _trace(rank: int, call: Call) -> tuple[list[Event], list[Mark]]:
    world = dist.group.WORLD
    assert world is not None
    groups = Groups.from_topology(world, intra=call.per_node)
    torch.manual_seed(rank)
    shapes = [(call.tokens, 1, heads, call.width) for heads in (call.heads, call.kv_heads)]
    q, k, v = (torch.randn(shapes[i > 0], requires_grad=True) for i in range(3))
    plan = prepare(
        q, k, v, groups=groups, algorithm=call.algorithm, side=call.side,
        head_chunks=call.head_chunks,
    )  # fmt: skip
    attention(q, k, v, plan=plan).sum().backward()  # the first exchange also makes the connections
    tracing, events = traced(plan)
    dist.barrier()
    times = [time.perf_counter()]
    out = attention(q, k, v, plan=tracing)
    times.append(time.perf_counter())
    dist.barrier()
    times.append(time.perf_counter())
    out.backward(torch.ones_like(out))
    times.append(time.perf_counter())
    dist.barrier()
    return events, [("forward", times[0], times[1]), ("backward", times[2], times[3])]

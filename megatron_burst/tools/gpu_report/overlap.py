"""Does communication hide behind computation? Each alone and both at once, on the real groups.

Under torchrun: an exchange with the neighbour while the local attention runs, and an exchange on
the ring within nodes while another is on the ring between them, of a grid of two halves. The result
is stated as hidden = (a + b - both) / min(a, b): 1 where the shorter costs nothing, 0 where one
waits for the other. Two rings of one node share its links, so below 1 is no fault there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import megatron_burst as mb

from ...autotune import measure
from ...autotune.measure import seconds
from ...cli.doctor import machine
from ...cli.doctor.report import Finding, note, ok, problem
from ...comm.transport import Channel
from ...units import duration
from .times import ROUNDS, calls

ONE = "one GPU: not measured; start it under torchrun with two ranks or more"
SIZE = {"cuda": 2**27, "cpu": 2**20}  # bytes of a message
ROWS = {"cuda": 4096, "cpu": 64}
LIMIT = timedelta(seconds=120)
Record = dict[str, Any]


def measured(device: torch.device, record: Record) -> Iterator[Finding]:
    """Findings, and to `record` what was measured: "pairs", of each pair of activities seconds of
    either alone, of both, and how much was hidden. Collective under torchrun, where it makes and
    ends the default process group; every rank gets the slowest rank's seconds."""
    record["pairs"] = {}
    if machine.world_size() < 2:
        yield note("overlap", ONE)
        return
    try:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=LIMIT)
        yield from _pairs(device, record)
    except Exception as error:  # the rest of the file is worth having
        first = (str(error).splitlines() or [""])[0]
        record["failed"] = f"{type(error).__name__}: {first[:300]}"
        yield problem("overlap", record["failed"], "megatron-burst doctor --distributed says more")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _pairs(device: torch.device, record: Record) -> Iterator[Finding]:
    ranks = dist.get_world_size()
    intra = ranks // 2 if ranks % 2 == 0 and ranks > 2 else ranks
    world = dist.group.WORLD
    assert world is not None  # `measured` has made it
    groups = mb.Groups.from_topology(world, intra=intra)
    record |= {"ranks": ranks, "grid": [ranks // intra, intra]}
    pairs = {"attention and ring": _beside_attention(groups, device)}
    if intra < ranks:
        rings = [_exchange(groups, ring, device) for ring in ("intra", "inter")]
        pairs["two rings"] = rings[0], rings[1]
    for name, (first, second) in pairs.items():
        record["pairs"][name] = times = compared(first, second, device)
        yield ok(
            f"overlap, {name}",
            f"{duration(times['first'])} and {duration(times['second'])} alone, "
            f"{duration(times['both'])} at once: {times['hidden']:.0%} hidden",
        )


Begun = Callable[[], Callable[[], object]]  # begins, and returns what waits for the end


def compared(first: Begun, second: Begun, device: torch.device) -> Record:
    """Medians of rounds in which each is taken in turn, by the slowest rank. Collective."""

    def both() -> None:
        ends = [first(), second()]
        for end in ends:
            end()

    runs = {"first": lambda: first()(), "second": lambda: second()(), "both": both}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(1 + ROUNDS):
        for name, run in runs.items():
            dist.barrier()
            took = _slowest(seconds(run, device), device)
            if turn:
                times[name].append(took)
    alone, other, at_once = (median(times[name]) for name in runs)
    hidden = (alone + other - at_once) / min(alone, other)
    return {"first": alone, "second": other, "both": at_once, "hidden": hidden}


def _slowest(value: float, device: torch.device) -> float:
    slowest = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def _beside_attention(groups: mb.Groups, device: torch.device) -> tuple[Begun, Begun]:
    """An exchange, which is begun first as in a ring, and as many forwards of the local attention
    as take about as long."""
    exchange = _exchange(groups, "intra", device)
    forward = calls("auto", ROWS[device.type], device)["auto", "forward"]
    for run in (lambda: exchange()(), forward):
        run()  # makes connections, compiles
    long = _slowest(seconds(lambda: exchange()(), device), device)
    times = max(1, min(1000, round(long / _slowest(seconds(forward, device), device))))

    def compute() -> Callable[[], object]:
        for _ in range(times):
            forward()
        return lambda: None

    return exchange, compute


def _exchange(groups: mb.Groups, ring: str, device: torch.device) -> Begun:
    """One message to the next rank of a ring and one from the last, on the ring's own channel."""
    route = measure.peers(groups, ring)
    assert route is not None  # every ring here has two ranks or more
    route = route._replace(channel=Channel(ring, False))
    groups.connect([route.channel], device)
    start = measure.starter(route, SIZE[device.type], device)
    return lambda: start().wait

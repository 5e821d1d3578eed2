# SPDX-License-Identifier: Apache-2.0
"""How long each kernel takes on this device, and what communication hides behind it.

Kernels: one causal pair, forward and backward; they take turns, round by round, so that whatever
else the machine does slows all of them alike. Overlap, under torchrun: an exchange with the
neighbour while the local attention runs, and an exchange on the ring within nodes while another is
on the ring between them, of a grid of two halves. The result is stated as hidden = (a + b - both) /
min(a, b): 1 where the shorter costs nothing, 0 where one waits for the other. Two rings of one node
share its links, so below 1 is no fault there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median, quantiles
from typing import Any

import torch

from ....autotune import measure
from ....autotune.measure import local_calls, seconds
from ....cli.doctor import machine
from ....cli.doctor.report import Finding, note, ok, problem
from ....kernels.base import Scoring
from ....kernels.registry import KERNELS, make
from ....masks import Causal
from ....units import duration
from ..calibrate.ranks import Ranks, first_line, joined

ROWS = {"cuda": (4096, 16384), "cpu": (64,)}
HEADS = {"cuda": (32, 8), "cpu": (4, 2)}
WIDTH = 128
ROUNDS = 7  # after one that does not count
MESSAGE = {"cuda": 2**27, "cpu": 2**20}  # bytes
ONE = "one GPU: not measured; start it under torchrun with two ranks or more"
Record = dict[str, Any]
Call = Callable[[], object]
Begun = Callable[[], Call]  # begins, and returns what waits for the end


def in_turn(runs: Mapping[Any, Call], took: Callable[[Call], float]) -> dict[Any, list[float]]:
    """What `took` says of each of these in rounds of all of them; the first does not count."""
    times: dict[Any, list[float]] = {key: [] for key in runs}
    for turn in range(1 + ROUNDS):
        for key, run in runs.items():
            value = took(run)
            if turn:
                times[key].append(value)
    return times


# --- kernels -------------------------------------------------------------------------------


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return {"median": middle, "low": low, "high": high}


def kernels(device: torch.device, records: list[Record]) -> Iterator[Finding]:
    """A finding for each size; to `records` one of each kernel, size and pass is added: seconds
    as of `spread`, and TFLOP/s on the pairs that attend at the median.
    """
    for rows in ROWS[device.type]:
        every = {}
        for name in KERNELS:
            if name == "reference" and device.type == "cuda":
                continue  # it holds every score at once
            try:
                every |= calls(name, rows, device)
            except ValueError:
                continue  # refused, as `accuracy` says
            except Exception as error:
                yield note(f"times, kernel {name}, {rows} rows", first_line(error))
        try:
            rounds = in_turn(every, lambda call: seconds(call, device))
        except Exception as error:
            yield note(f"times, {rows} rows", first_line(error))
            continue
        timed = [_record(name, way, rows, device, took) for (name, way), took in rounds.items()]
        records += timed
        words = [f"{r['kernel']} {r['pass']} {duration(r['seconds']['median'])}" for r in timed]
        yield ok(f"times, {rows} rows", ", ".join(words))


def calls(name: Any, rows: int, device: torch.device) -> dict[tuple[str, str], Call]:
    """A forward and a backward of a kernel, each run once; raises what the kernel raises."""
    h, k = HEADS[device.type]
    like = {"device": device, "dtype": torch.bfloat16}
    q, keys, values = (torch.empty(rows, 1, n, WIDTH, **like) for n in (h, k, k))
    kernel, scoring = make(name, q, keys, values, mask=Causal()), Scoring(WIDTH**-0.5)
    run = local_calls(kernel, scoring, Causal(), (q, keys, values), rows, knows_out=True)
    return {(name, "forward"): run.forward, (name, "backward"): run.backward}


def _record(name: str, way: str, rows: int, device: torch.device, took: list[float]) -> Record:
    heads, quartiles = HEADS[device.type], spread(took)
    products = 2 if way == "forward" else 5
    flops = products * 2 * (rows * (rows + 1) // 2) * heads[0] * WIDTH
    return {
        "kernel": name, "pass": way, "rows": rows, "heads": list(heads), "width": WIDTH,
        "seconds": quartiles, "tflops": flops / quartiles["median"] / 1e12,
    }  # fmt: skip


# --- overlap -------------------------------------------------------------------------------


def overlap(device: torch.device, record: Record) -> Iterator[Finding]:
    """Findings, and to `record` what was measured: "pairs", of each pair of activities seconds of
    either alone, of both, and how much was hidden. Collective under torchrun, where it makes and
    ends the default process group; every rank gets the slowest rank's seconds.
    """
    record["pairs"] = {}
    size = machine.world_size()
    if size < 2:
        yield note("overlap", ONE)
        return
    try:
        with joined(size // 2 if size % 2 == 0 and size > 2 else size, 0.0, device) as ranks:
            yield from _pairs(ranks, record)
    except Exception as error:  # the rest of the file is worth having
        record["failed"] = first_line(error)
        yield problem("overlap", record["failed"], "megatron-burst doctor --distributed says more")


def _pairs(ranks: Ranks, record: Record) -> Iterator[Finding]:
    record |= {"ranks": ranks.size, "grid": [ranks.nodes, ranks.per_node]}
    pairs = {"attention and ring": _beside_attention(ranks)}
    if ranks.nodes > 1:
        pairs["two rings"] = _exchange(ranks, "intra"), _exchange(ranks, "inter")
    for name, (first, second) in pairs.items():
        record["pairs"][name] = times = compared(ranks, first, second)
        yield ok(
            f"overlap, {name}",
            f"{duration(times['first'])} and {duration(times['second'])} alone, "
            f"{duration(times['both'])} at once: {times['hidden']:.0%} hidden",
        )


def compared(ranks: Ranks, first: Begun, second: Begun) -> Record:
    """Medians of rounds in which each is taken in turn, by the slowest rank. Collective."""

    def both() -> None:
        ends = [first(), second()]
        for end in ends:
            end()

    runs = {"first": lambda: first()(), "second": lambda: second()(), "both": both}
    times = {name: median(took) for name, took in in_turn(runs, ranks.slowest).items()}
    alone, other, at_once = times.values()
    return times | {"hidden": (alone + other - at_once) / min(alone, other)}


def _beside_attention(ranks: Ranks) -> tuple[Begun, Begun]:
    """An exchange, which is begun first as in a ring, and as many forwards of the local attention
    as take about as long.
    """
    exchange, device = _exchange(ranks, "intra"), ranks.device
    forward = calls("auto", ROWS[device.type][0], device)["auto", "forward"]
    runs: list[Call] = [lambda: exchange()(), forward]
    for run in runs:
        run()  # makes connections, compiles
    long, once = map(ranks.slowest, runs)
    times = max(1, min(1000, round(long / once)))

    def compute() -> Call:
        for _ in range(times):
            forward()
        return lambda: None

    return exchange, compute


def _exchange(ranks: Ranks, ring: str) -> Begun:
    """One message to the next rank of a ring and one from the last, on the ring's own channel."""
    route = measure.ring_peers(ranks.groups, ring, ranks.device)
    assert route is not None  # every ring here has two ranks or more
    start = measure.starter(route, MESSAGE[ranks.device.type], ranks.device)
    return lambda: start().wait

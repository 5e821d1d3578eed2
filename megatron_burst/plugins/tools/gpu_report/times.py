# SPDX-License-Identifier: Apache-2.0
"""Times of each kernel on this device, and overlap of communication and compute.

Each kernel runs forward and backward of one causal pair of chunks (queries and keys). The kernels
alternate, so that other load on the machine affects all of them equally.

Overlap is measured under torchrun for two pairs of activities: an exchange with the neighbour
during local attention, and an exchange on the inner ring during an exchange on the outer ring. For
the rings, each half of the ranks counts as a node. If the activities need a and b seconds alone and
c seconds together, the hidden fraction is (a + b - c) / min(a, b). It is 1 if the shorter activity
adds no time, and 0 if the activities run one after the other. For two rings on one node, values
below 1 are normal, because the rings share links.
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
ROUNDS = 7  # measured rounds, after one round of warm-up
MESSAGE = {"cuda": 2**27, "cpu": 2**20}  # bytes
ONE_GPU = "one GPU: not measured; start the doctor under torchrun with two ranks or more"
Record = dict[str, Any]
Call = Callable[[], object]
Start = Callable[[], Call]  # starts work and returns a function that waits for its end


def in_turn(runs: Mapping[Any, Call], measure: Callable[[Call], float]) -> dict[Any, list[float]]:
    """Run all calls once per round, and measure them.

    The first round is a warm-up and is not returned.

    Args:
        runs: Key -> call.
        measure: Function that runs a call and returns its seconds.

    Returns:
        Key -> seconds of the call in each round.
    """
    times: dict[Any, list[float]] = {key: [] for key in runs}
    for turn in range(1 + ROUNDS):
        for key, run in runs.items():
            elapsed = measure(run)
            if turn:
                times[key].append(elapsed)
    return times


# --- kernels -------------------------------------------------------------------------------


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median and the quartiles of values, as "median", "low" and "high"."""
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return {"median": middle, "low": low, "high": high}


def kernels(device: torch.device, records: list[Record]) -> Iterator[Finding]:
    """Measure all kernels with several numbers of rows.

    Args:
        device: Device of the kernels.
        records: List to which a record per kernel, number of rows and direction is appended. It has
            the seconds, as returned by `spread`, and the TFLOP/s on visible pairs at the median
            time.

    Yields:
        A finding per number of rows.
    """
    for rows in ROWS[device.type]:
        timed_calls = {}
        for name in KERNELS:
            if name == "reference" and device.type == "cuda":
                continue  # the kernel materializes all scores
            try:
                timed_calls |= calls(name, rows, device)
            except ValueError:
                continue  # not supported; `accuracy` reports the reason
            except Exception as error:
                yield note(f"times, kernel {name}, {rows} rows", first_line(error))
        try:
            rounds = in_turn(timed_calls, lambda call: seconds(call, device))
        except Exception as error:
            yield note(f"times, {rows} rows", first_line(error))
            continue
        timed = [
            _record(name, direction, rows, device, samples)
            for (name, direction), samples in rounds.items()
        ]
        records += timed
        words = [f"{r['kernel']} {r['pass']} {duration(r['seconds']['median'])}" for r in timed]
        yield ok(f"times, {rows} rows", ", ".join(words))


def calls(name: Any, rows: int, device: torch.device) -> dict[tuple[str, str], Call]:
    """Return the forward and backward calls of a kernel: (kernel, direction) -> call.

    Each call has run once, as a warm-up.
    """
    h, k = HEADS[device.type]
    like = {"device": device, "dtype": torch.bfloat16}
    q, keys, values = (torch.empty(rows, 1, n, WIDTH, **like) for n in (h, k, k))
    kernel, scoring = make(name, q, keys, values, mask=Causal()), Scoring(WIDTH**-0.5)
    run = local_calls(kernel, scoring, Causal(), (q, keys, values), rows, knows_out=True)
    return {(name, "forward"): run.forward, (name, "backward"): run.backward}


def _record(
    name: str, direction: str, rows: int, device: torch.device, samples: list[float]
) -> Record:
    heads, quartiles = HEADS[device.type], spread(samples)
    products = 2 if direction == "forward" else 5
    flops = products * 2 * (rows * (rows + 1) // 2) * heads[0] * WIDTH
    return {
        "kernel": name, "pass": direction, "rows": rows, "heads": list(heads), "width": WIDTH,
        "seconds": quartiles, "tflops": flops / quartiles["median"] / 1e12,
    }  # fmt: skip


# --- overlap -------------------------------------------------------------------------------


def overlap(device: torch.device, record: Record) -> Iterator[Finding]:
    """Measure how well communication overlaps with compute and with other communication.

    Under torchrun this is a collective call, which creates and destroys the default process group.

    Args:
        device: Device of this rank.
        record: Dictionary to which "pairs" is added: the result of `compared` for each pair of
            activities.

    Yields:
        A finding per pair of activities.
    """
    record["pairs"] = {}
    size = machine.world_size()
    if size < 2:
        yield note("overlap", ONE_GPU)
        return
    try:
        with joined(size // 2 if size % 2 == 0 and size > 2 else size, 0.0, device) as ranks:
            yield from _pairs(ranks, record)
    except Exception as error:  # the other sections are still useful
        record["failed"] = first_line(error)
        yield problem(
            "overlap", record["failed"], "run megatron-burst doctor --distributed for details"
        )


def _pairs(ranks: Ranks, record: Record) -> Iterator[Finding]:
    record |= {"ranks": ranks.size, "grid": [ranks.nodes, ranks.per_node]}
    pairs = {"attention and ring": _attention_and_exchange(ranks)}
    if ranks.nodes > 1:
        pairs["two rings"] = _exchange(ranks, "intra"), _exchange(ranks, "inter")
    for name, (first, second) in pairs.items():
        record["pairs"][name] = times = compared(ranks, first, second)
        yield ok(
            f"overlap, {name}",
            f"{duration(times['first'])} and {duration(times['second'])} alone, "
            f"{duration(times['both'])} at once: {times['hidden']:.0%} hidden",
        )


def compared(ranks: Ranks, first: Start, second: Start) -> Record:
    """Measure two activities alone and together. A collective call.

    Returns:
        The slowest rank's median seconds of the activities alone ("first", "second") and together
            ("both"), and the fraction "hidden", which the docstring of the module defines.
    """

    def at_once() -> None:
        ends = [first(), second()]
        for end in ends:
            end()

    runs = {"first": lambda: first()(), "second": lambda: second()(), "both": at_once}
    times = {name: median(samples) for name, samples in in_turn(runs, ranks.slowest).items()}
    first_alone, second_alone, together = times.values()
    hidden = (first_alone + second_alone - together) / min(first_alone, second_alone)
    return times | {"hidden": hidden}


def _attention_and_exchange(ranks: Ranks) -> tuple[Start, Start]:
    """Return functions that start an exchange and local attention, in this order, as in a ring.

    Local attention is repeated so that it takes about as long as the exchange.
    """
    exchange, device = _exchange(ranks, "intra"), ranks.device
    forward = calls("auto", ROWS[device.type][0], device)["auto", "forward"]
    runs: list[Call] = [lambda: exchange()(), forward]
    for run in runs:
        run()  # opens connections and compiles
    long, once = map(ranks.slowest, runs)
    times = max(1, min(1000, round(long / once)))

    def compute() -> Call:
        for _ in range(times):
            forward()
        return lambda: None

    return exchange, compute


def _exchange(ranks: Ranks, ring: str) -> Start:
    """Return a function that starts an exchange with the next and the previous rank of a ring."""
    route = measure.ring_peers(ranks.groups, ring, ranks.device)
    assert route is not None  # every ring here has at least two ranks
    start = measure.starter(route, MESSAGE[ranks.device.type], ranks.device)
    return lambda: start().wait

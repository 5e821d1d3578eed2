"""How long each kernel takes on this device: one causal pair, forward and backward.

Timed by CUDA events on a GPU and by the wall clock on a CPU. Kernels take turns, round by round, so
that whatever else the machine does slows all of them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import quantiles
from typing import Any

import torch

from ...autotune.measure import local_calls, seconds
from ...cli.doctor.report import Finding, note, ok
from ...kernels.base import Scoring
from ...kernels.registry import KERNELS, make
from ...masks import Causal
from ...units import duration

ROWS = {"cuda": (4096, 16384), "cpu": (64,)}
HEADS = {"cuda": (32, 8), "cpu": (4, 2)}
WIDTH = 128
ROUNDS = 7  # after one that does not count
Record = dict[str, Any]
Call = Callable[[], object]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return {"median": middle, "low": low, "high": high}


def kernels(device: torch.device, records: list[Record]) -> Iterator[Finding]:
    """A finding for each size; to `records` one of each kernel, size and pass is added: seconds
    as of `spread`, and TFLOP/s on the pairs that attend at the median."""
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
                yield _failed(f"kernel {name}, {rows} rows", error)
        try:
            rounds = _rounds(every, device)
        except Exception as error:
            yield _failed(f"{rows} rows", error)
            continue
        timed = [_record(name, way, rows, device, took) for (name, way), took in rounds.items()]
        records += timed
        words = [f"{r['kernel']} {r['pass']} {duration(r['seconds']['median'])}" for r in timed]
        yield ok(f"times, {rows} rows", ", ".join(words))


def _failed(what: str, error: Exception) -> Finding:
    first = (str(error).splitlines() or [""])[0]
    return note(f"times, {what}", f"{type(error).__name__}: {first[:200]}")


def _rounds(every: dict[tuple[str, str], Call], device: torch.device) -> dict[Any, list[float]]:
    times: dict[Any, list[float]] = {key: [] for key in every}
    for turn in range(1 + ROUNDS):
        for key, call in every.items():
            took = seconds(call, device)
            if turn:
                times[key].append(took)
    return times


def calls(name: Any, rows: int, device: torch.device) -> dict[tuple[str, str], Call]:
    """A forward and a backward of a kernel, each run once; raises what the kernel raises."""
    h, k = HEADS[device.type]
    draw = torch.Generator(device).manual_seed(0)
    q, keys, values, dout = (
        torch.randn(rows, 1, n, WIDTH, generator=draw, device=device, dtype=torch.bfloat16)
        for n in (h, k, k, h)
    )
    kernel = make(name, q, keys, values, mask=Causal())
    tensors = q, keys, values, dout
    run = local_calls(kernel, Scoring(WIDTH**-0.5), Causal(), *tensors, knows_out=True)
    return {(name, "forward"): run.forward, (name, "backward"): run.backward}


def _record(name: str, way: str, rows: int, device: torch.device, took: list[float]) -> Record:
    heads, quartiles = HEADS[device.type], spread(took)
    products = 2 if way == "forward" else 5
    flops = products * 2 * (rows * (rows + 1) // 2) * heads[0] * WIDTH
    return {
        "kernel": name, "pass": way, "rows": rows, "heads": list(heads), "width": WIDTH,
        "seconds": quartiles, "tflops": flops / quartiles["median"] / 1e12,
    }  # fmt: skip

"""How long each kernel takes on this device: one causal pair, forward and backward.

On a GPU by events on its own time line, on a CPU by the wall clock. Kernels take turns, round by
round, so that whatever else the machine does hits all alike. Decides what is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import quantiles
from typing import Any

import torch

from ....kernels.base import Rows, Scoring
from ....kernels.online_softmax import empty_result
from ....kernels.registry import KERNELS, make
from ....layout import Span
from ....masks import Causal
from ....units import duration
from ..finding import Finding, note, ok

ROWS = {"cuda": (4096, 16384), "cpu": (64,)}
HEADS = {"cuda": (32, 8), "cpu": (4, 2)}
WIDTH = 128
ROUNDS = 7  # after one that does not count
Record = dict[str, Any]
Call = Callable[[], object]


def seconds(call: Call, device: torch.device, before: Call = lambda: None) -> float:
    """Of one call. before: begins what is to run beside it, on a device that is idle."""
    if device.type == "cpu":
        before()
        begun = time.perf_counter()
        call()
        return time.perf_counter() - begun
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    before()
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / 1e3


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
            found = _rounds(every, device)
        except Exception as error:
            yield _failed(f"{rows} rows", error)
            continue
        mine = [_record(name, way, rows, device, took) for (name, way), took in found.items()]
        records += mine
        words = [f"{r['kernel']} {r['pass']} {duration(r['seconds']['median'])}" for r in mine]
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


@torch.no_grad()
def calls(name: Any, rows: int, device: torch.device) -> dict[tuple[str, str], Call]:
    """A forward and a backward of a kernel, each run once; raises what the kernel raises."""
    h, k = HEADS[device.type]
    draw = torch.Generator(device).manual_seed(0)
    q, keys, values, dout = (
        torch.randn(rows, 1, n, WIDTH, generator=draw, device=device, dtype=torch.bfloat16)
        for n in (h, k, k, h)
    )
    kernel, spans = make(name, q, keys, values, mask=Causal()), [Span(0, 1, rows)]
    work, scoring = kernel.work_for(Causal(), spans, spans), Scoring(WIDTH**-0.5)
    out, lse = empty_result(q, WIDTH)

    def forward() -> None:
        kernel.forward(q, keys, values, work, scoring, out, lse)

    forward()
    sums = [torch.zeros_like(x, dtype=torch.float32) for x in (q, keys, values)]
    known = out.to(q.dtype)
    there = Rows(q, dout, lse.clone(), (dout.float() * known.float()).sum(-1), known)

    def backward() -> None:
        kernel.backward(there, keys, values, work, scoring, *sums)

    backward()
    return {(name, "forward"): forward, (name, "backward"): backward}


def _record(name: str, way: str, rows: int, device: torch.device, took: list[float]) -> Record:
    heads, found = HEADS[device.type], spread(took)
    products = 2 if way == "forward" else 5
    flops = products * 2 * (rows * (rows + 1) // 2) * heads[0] * WIDTH
    return {
        "kernel": name, "pass": way, "rows": rows, "heads": list(heads), "width": WIDTH,
        "seconds": found, "tflops": flops / found["median"] / 1e12,
    }  # fmt: skip

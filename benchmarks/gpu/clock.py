"""Timing: on a device by events, on a CPU by the wall clock; runs in turns.

Runs are ordered A B C A B C ..., so that other load and the device's clock affect all of them, and
ratios are taken within a round. This module also decides what counts as memory of a run.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch


class Clock:
    """Marks on the time line of a device; times between marks are known after `finish`."""

    def __init__(self, device: torch.device):
        self.device, self.cuda = device, device.type == "cuda"

    def mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def finish(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def seconds(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1e3 if self.cuda else end - begin


class Run(NamedTuple):
    """One run: `call` is timed, its preparation `before` is not."""

    call: Callable[[], object]
    before: Callable[[], object] = lambda: None


def interleaved(
    runs: Mapping[str, Run],
    clock: Clock,
    repeats: int,
    patience: float = float("inf"),
    ahead: Callable[[], object] | None = None,
) -> dict[str, list[float]]:
    """Return seconds of each run, round by round, after a warm-up round.

    Args:
        patience: Seconds after which three rounds are enough.
        ahead: Untimed work before every call, so that the device is busy while the host launches
            the call, as in training.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    begun = time.perf_counter()
    for repeat in range(1 + repeats):
        if repeat > 3 and time.perf_counter() - begun > patience:
            break
        for name, run in runs.items():
            seconds = timed(run, clock, ahead)
            if repeat:
                times[name].append(seconds)
    return times


def timed(run: Run, clock: Clock, ahead: Callable[[], object] | None = None) -> float:
    """Return seconds of one call, alone on the device."""
    run.before()
    clock.finish()
    if ahead is not None:
        ahead()
    begin = clock.mark()
    run.call()
    end = clock.mark()
    clock.finish()
    return clock.seconds(begin, end)


def extra(run: Run, clock: Clock) -> int | None:
    """Return the additional device bytes at the peak of one call; None on a CPU."""
    run.before()
    if not clock.cuda:
        run.call()
        return None
    clock.finish()
    torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated()
    run.call()
    clock.finish()
    return torch.cuda.max_memory_allocated() - allocated


def forget(device: torch.device) -> None:
    """Free unused memory of a device."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()

"""Bytes and times of a run's first step, from which the fraction is chosen or checked.

The first step moves what fits on the host and never fails for lack of it: whether the rest of the
run fits is decided at its end, by all ranks together.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch

from megatron_burst.megatron.offload.demand import Demand


class Clock:
    """Time from its making to `stop`, on the device where there is one, else on this thread."""

    def __init__(self, on_device: bool) -> None:
        self.on_device = on_device
        self.marks = [self._now()]

    def _now(self) -> Any:
        if not self.on_device:
            return time.perf_counter()
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        return mark

    def stop(self) -> None:
        self.marks.append(self._now())

    def seconds(self) -> float:
        """Waits for the device."""
        start, end = self.marks
        if not self.on_device:
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1e3


class FirstStep:
    """Collects what calls leave in the first step; ``passes``: micro-batches, once per model
    chunk, that are in flight at the same time."""

    def __init__(self, passes: int) -> None:
        self.passes = passes
        self.spilt = 0  # bytes for which there was no room
        self._clocks: list[Clock] = []
        self._largest = 0
        self._of_passes = [0]

    def next_pass(self) -> None:
        """Another micro-batch begins, or the same in another model chunk."""
        self._of_passes.append(0)

    def spill(self, nbytes: int) -> None:
        """So many bytes stay, because there is no room."""
        self.spilt += nbytes

    def add(self, nbytes: int, clock: Clock) -> None:
        """A call that left so many bytes for the host, whether or not there was room."""
        self._largest = max(self._largest, nbytes)
        self._of_passes[-1] += nbytes
        self._clocks.append(clock)

    def demand(self) -> Demand:
        """What this rank moves at the fraction of the first step."""
        seconds = median(clock.seconds() for clock in self._clocks) if self._clocks else 0.0
        sums = max(self._of_passes)
        return Demand(self._largest, seconds, sums, self.passes, bool(self.spilt))

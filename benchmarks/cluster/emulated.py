"""Compute that takes as long as on a device of a stated speed, with correct results.

Eight ranks on two cores cannot overlap compute. A kernel computes every pair of chunks once and
keeps the result. Later calls return the kept result and sleep for FLOPs / speed. Results are looked
up by the content of the input tensors (samples of every head), so a missing chunk raises an error.
Such times are labelled "emulated". Only the local attention is replaced.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, ClassVar

import torch

from megatron_burst.kernels.base import Kernel, Rows, Scoring
from megatron_burst.kernels.online_softmax import empty_result, merge_

BACKWARD = 2.5  # FLOPs of flash backward / forward: five products instead of two
ROWS, COLUMNS = 16, 4  # size of the sample of each head of a tensor
Key = tuple[Any, ...]


@dataclass
class Memory:
    """Results of pairs by their inputs; results may be added while `open` is true."""

    open: bool = True
    results: dict[Key, Any] = field(default_factory=dict)

    def get(self, key: Key, compute: Any) -> Any:
        if key not in self.results:
            if not self.open:
                raise RuntimeError("emulated compute was given chunks that no rank ever held")
            self.results[key] = compute()
        return self.results[key]


@dataclass
class EmulatedKernel:
    """Kernel that wraps a real kernel and emulates its time.

    Attributes:
        speed: FLOP/s, None for compute that takes no time.
        flops_per_head: FLOPs of one visible (query, key) pair in forward.
        slack: Allowed difference of the sums of lse and delta from the first run's sums, because
            outputs that were sent are rounded.
    """

    real: Kernel
    memory: Memory
    speed: float | None
    flops_per_head: int
    slack: float = 1e-2
    writes_new: ClassVar[bool] = False  # the results of the first run are added

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, work: Any, scoring: Scoring,
        out: torch.Tensor, lse: torch.Tensor, max_logits: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        assert max_logits is None, "what is emulated has no scores"
        begin = time.perf_counter()
        key = ("forward", *map(_samples, (q, k, v)))

        def compute() -> Any:
            alone = empty_result(q, v.shape[-1])
            self.real.forward(q, k, v, work, scoring, *alone)
            return alone

        merge_(out, lse, *self.memory.get(key, compute))
        self._take(begin, q.shape[2], work, 1.0)

    def backward(
        self, rows: Rows, k: torch.Tensor, v: torch.Tensor, work: Any, scoring: Scoring,
        *sums: torch.Tensor | None,
    ) -> None:  # fmt: skip
        begin = time.perf_counter()
        stats = torch.stack([rows.lse.sum(), rows.delta.sum()])
        key = ("backward", *map(_samples, (rows.q, rows.dout, k, v)))

        def compute() -> Any:
            grads = [None if x is None else torch.zeros_like(x) for x in sums]
            self.real.backward(rows, k, v, work, scoring, *grads)
            return stats, grads

        remembered, grads = self.memory.get(key, compute)
        # The order of merging changes the last bits of lse. So lse and delta are compared, not
        # looked up.
        if not torch.allclose(stats, remembered, rtol=1e-3, atol=self.slack):
            raise RuntimeError(f"emulated compute: lse and delta sum to {stats}, not {remembered}")
        for total, grad in zip(sums, grads, strict=True):
            if total is not None:
                total += grad
        self._take(begin, rows.q.shape[2], work, BACKWARD)

    def _take(self, begin: float, heads: int, work: Any, factor: float) -> None:
        """Sleep until the device's time has passed."""
        if self.speed is None or not self.memory.results:
            return
        flops = factor * self.flops_per_head * heads * visible(work)
        time.sleep(max(0.0, begin + flops / self.speed - time.perf_counter()))


@contextmanager
def urgent(emulated: bool) -> Iterator[None]:
    """Run all threads of this process before other programs, if allowed and compute is emulated.

    Work on the host then needs as little time as on a host with a GPU.
    """
    threads = [int(name) for name in os.listdir("/proc/self/task")] if emulated else []
    _schedule(threads, os.SCHED_FIFO, 1)
    try:
        yield
    finally:
        _schedule(threads, os.SCHED_OTHER, 0)


def _schedule(threads: Sequence[int], policy: int, priority: int) -> None:
    for thread in threads:
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.sched_setscheduler(thread, policy, os.sched_param(priority))


def oversleep() -> float:
    """Return seconds by which this process sleeps too long, as in every emulated call."""
    extra = []
    for _ in range(20):
        begin = time.perf_counter()
        time.sleep(0.003)
        extra.append(time.perf_counter() - begin - 0.003)
    return median(extra)


def visible(work: Sequence[Any]) -> int:
    """Return the visible (query, key) pairs of one pair of shards (kernel aten)."""
    return sum(call.tile.visible for call in work)


def _samples(x: torch.Tensor) -> tuple[torch.Size, bytes]:
    """Return shape and ROWS x COLUMNS entries of every head, without a copy of the tensor."""
    rows, columns = x.shape[0] // ROWS | 1, x.shape[-1] // COLUMNS | 1
    return x.shape, x[::rows, ..., ::columns].contiguous().view(torch.uint8).numpy().tobytes()

"""A whole ring on one device, and its overhead in addition to kernel calls.

All ranks run in one process and take their steps in order. Marks around every kernel call, and
around every operator call if a kernel has stock operators, measure their share of the time. The
rest is the ring's overhead: zeroing, converting, delta, Python, and copies on the device that
replace messages (on a cluster they overlap with compute).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from megatron_burst.kernels.registry import KERNELS
from megatron_burst.plugins.testing import in_process

from .clock import Clock, forget
from .sizes import Sizes

SIDES = ("kv", "query")
PASSES = ("forward", "backward")
COMPILED = ("flex",)  # kernels that compile for new shapes
Record = dict[str, Any]


class Meter:
    """Wrapper of an object that marks calls of its `forward` and `backward`."""

    def __init__(self, inner: Any, clock: Clock):
        self.inner, self.clock = inner, clock
        self.marks: list[tuple[Any, Any]] = []

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.inner, name)
        return self._marked(attribute) if name in PASSES else attribute

    def _marked(self, call: Any) -> Any:
        def marked(*args: Any, **named: Any) -> Any:
            begin = self.clock.mark()
            result = call(*args, **named)
            self.marks.append((begin, self.clock.mark()))
            return result

        return marked

    def take(self) -> float:
        """Return seconds of all calls since the last time, after `finish`."""
        marks, self.marks = self.marks, []
        return sum(self.clock.seconds(*ends) for ends in marks)


class Ring:
    """Inputs of all ranks, and a plan for one kernel and side."""

    def __init__(
        self, grid: tuple[int, int], tokens: int, heads: tuple[int, int], width: int, clock: Clock
    ):
        nodes, per_node = grid
        self.groups = in_process.groups(inter=nodes, intra=per_node)
        self.clock = clock
        torch.manual_seed(0)
        self.shards = [
            [
                torch.randn(tokens, 1, n, width, device=clock.device, dtype=torch.bfloat16)
                for _ in range(self.groups.size)
            ]
            for n in (heads[0], heads[1], heads[1], heads[0])
        ]
        for shard in self.shards[:3]:
            for x in shard:
                x.requires_grad_()

    def measure(self, kernel: str, side: str, rounds: int) -> Record:
        """Return seconds of both passes, of kernel calls and of operators, by round.

        Also return wall seconds of "prepare" and of a first round, which includes one-time work.
        """
        q, k, v, douts = self.shards
        begun = time.perf_counter()
        plan = in_process.prepare(q, k, v, groups=self.groups, side=side, kernel=kernel)
        calls = Meter(plan.kernel, self.clock)
        operator = None
        if hasattr(plan.kernel, "operator"):
            operator = Meter(plan.kernel.operator, self.clock)  # pyright: ignore
            plan.kernel.operator = operator  # pyright: ignore[reportAttributeAccessIssue]
        plan = plan.with_kernel(calls)
        record: Record = {name: {"seconds": [], "calls": [], "operators": []} for name in PASSES}
        for count in range(1 + rounds):
            outs: Sequence[torch.Tensor] = []
            for name in PASSES:
                self.clock.finish()
                begin = self.clock.mark()
                if name == "forward":
                    outs = in_process.attention(q, k, v, plan=plan)
                else:
                    torch.autograd.backward(outs, douts)
                end = self.clock.mark()
                self.clock.finish()
                times = self.clock.seconds(begin, end), calls.take()
                times += () if operator is None else (operator.take(),)
                if count:
                    for kind, value in zip(("seconds", "calls", "operators"), times, strict=False):
                        record[name][kind].append(value)
            for x in (*q, *k, *v):
                x.grad = None
            if not count:
                record["first"] = time.perf_counter() - begun
        return record


def measure(
    grid: tuple[int, int], kernels: Sequence[str], tokens: int, sizes: Sizes, clock: Clock
) -> Record:
    """Measure every kernel and side on one grid, with `tokens` tokens or as many as fit."""
    heads = sizes.heads[0]
    record: Record = {
        "kind": "ring", "nodes": grid[0], "per_node": grid[1], "heads": list(heads),
        "wanted": sizes.ring_tokens, "planned": tokens, "runs": [], "refused": {}, "failed": {},
    }  # fmt: skip
    while True:
        record["tokens"] = tokens
        try:
            return record | _measure(grid, kernels, tokens, sizes, clock)
        except torch.OutOfMemoryError:
            pass
        forget(clock.device)
        if tokens <= sizes.ring_least:
            return record | {"refused": {"all": "out of memory"}}
        tokens //= 2


def _measure(
    grid: tuple[int, int], kernels: Sequence[str], tokens: int, sizes: Sizes, clock: Clock
) -> Record:
    """Measure one size; raise OutOfMemoryError if it does not fit."""
    runs, refused, failed = [], {}, {}
    small, rest = max(sizes.ring_least, tokens // 8), (sizes.heads[0], sizes.width, clock)
    ring = Ring(grid, tokens, *rest)
    for kernel in kernels:
        try:
            Ring(grid, small, *rest).measure(kernel, "kv", 0)  # compile, load, refuse
            runs += [_one(ring, kernel, side, sizes.ring_rounds) for side in SIDES]
        except torch.OutOfMemoryError:
            raise
        except ValueError as reason:
            refused[kernel] = str(reason)
        except Exception as error:  # the other kernels are measured
            failed[kernel] = f"{type(error).__name__}: {str(error).splitlines()[0]:.200}"
    return {"runs": runs, "refused": refused, "failed": failed}


def _one(ring: Ring, kernel: str, side: str, rounds: int) -> Record:
    forget(ring.clock.device)
    if ring.clock.cuda:
        torch.cuda.reset_peak_memory_stats()
    record = ring.measure(kernel, side, rounds)
    peak = torch.cuda.max_memory_allocated() if ring.clock.cuda else None
    return {"kernel": kernel, "side": side, "peak": peak, **record}


def kernels(device: torch.device, compiled: bool = False) -> list[str]:
    """Return the kernels of this device.

    On a GPU the reference, which holds all scores, is omitted. Kernels that compile for new shapes
    are omitted unless `compiled`.
    """
    if device.type == "cpu":
        return list(KERNELS)
    omitted = ("reference",) if compiled else ("reference", *COMPILED)
    return [name for name in KERNELS if name not in omitted]


def seconds(run: Record) -> float:
    """Return seconds of the fastest round, both passes."""
    return sum(min(run[name]["seconds"]) for name in PASSES)


def next_size(
    grid: tuple[int, int], earlier: Record | None, sizes: Sizes, available: float
) -> tuple[int, list[str] | None]:
    """Return (tokens per rank, kernels) for a larger grid after a smaller one.

    The kernel is the smaller grid's fastest. The number of tokens is the largest with which both
    sides are predicted to end in time; time grows with its square.
    """
    runs = earlier["runs"] if earlier else []
    if not earlier or not runs:
        return sizes.ring_tokens, None
    fastest = min(runs, key=seconds)["kernel"]
    fastest_runs = [run for run in runs if run["kernel"] == fastest]
    once = sum(run["first"] + sizes.ring_rounds * seconds(run) for run in fastest_runs)
    before = earlier["nodes"] * earlier["per_node"] * earlier["tokens"]
    tokens, limit = sizes.ring_tokens, min(available, sizes.ring_patience)
    while tokens > sizes.ring_least:
        if once * (grid[0] * grid[1] * tokens / before) ** 2 <= limit:
            break
        tokens //= 2
    return tokens, [fastest]

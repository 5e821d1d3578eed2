"""One pair of shards: every kernel and every rival on the same inputs, in turns.

A kernel's forward merges into float32 sums and its backward adds to them, as in a step of the ring;
both are measured. Backward is measured with the output (side "kv") and without it (side "query").
Each result is checked before its time counts. This module decides the content of a record, and
`tables` the form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from megatron_burst.kernels.base import Kernel, Rows, Scoring
from megatron_burst.kernels.online_softmax import empty_result
from megatron_burst.kernels.registry import make

from . import rivals
from .cases import Case
from .clock import Clock, Run, extra, forget, interleaved
from .ring import kernels
from .rivals import Cannot, Inputs
from .sample import TOLERANCE, Sample
from .sizes import Sizes

FORWARD, KV, QUERY = "forward", "backward", "backward, side query"
Record = dict[str, Any]


class Cell(NamedTuple):
    case: Case
    heads: tuple[int, int]
    tokens: int
    compiled: bool = False  # True: kernels and rivals that compile, instead of the other rivals

    @property
    def name(self) -> str:
        h, k = self.heads
        what = "compiled rivals" if self.compiled else "attention"
        return f"{what}, {self.case.name}, {h}:{k} heads, {self.tokens} rows"


class Statistics(NamedTuple):
    """Statistics of all rows of the pair, by a forward with correct samples."""

    out: torch.Tensor  # [s, b, h, w] in 16 bits
    lse: torch.Tensor  # [s, b, h]
    delta: torch.Tensor  # [s, b, h]


class Bench:
    """A cell during measurement: inputs, sums that all kernels share, results."""

    def __init__(self, cell: Cell, width: int, clock: Clock, dtype: torch.dtype = torch.bfloat16):
        self.cell, self.width, self.clock, self.case = cell, width, clock, cell.case
        torch.manual_seed(0)
        (h, k), n = cell.heads, cell.tokens
        q, k_, v, dout = (
            torch.randn(n, 1, heads, width, device=clock.device, dtype=dtype)
            for heads in (h, k, k, h)
        )
        self.inputs = Inputs(q, k_, v, dout, width**-0.5)
        self.sample = Sample(self.inputs, self.case)
        self.sums = [torch.zeros(x.shape, device=x.device) for x in (q, k_, v)]
        self.runs: dict[tuple[str, str], Run] = {}  # (who, pass) -> what to time
        self.checks: dict[tuple[str, str], Record] = {}  # same keys; error and extra fields
        self.refused: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        self.statistics: Statistics | None = None

    def admit(self, who: str, prepare: Callable[[], None]) -> None:
        """Let a kernel or rival compute the case once; record a refusal or an error."""
        try:
            prepare()
        except (Cannot, ValueError) as reason:
            self.refused[who] = str(reason)
        except torch.OutOfMemoryError:
            self.refused[who] = "out of memory"
        except Exception as error:  # after any error the others are measured
            self.failed[who] = f"{type(error).__name__}: {str(error).splitlines()[0]:.200}"
        if who in self.failed or who in self.refused:
            for key in [key for key in self.runs if key[0] == who]:
                del self.runs[key]
            forget(self.clock.device)

    def add(self, who: str, name: str, run: Run, check: Callable[[], float]) -> None:
        """Run a call once, check its results, and keep the call for timing."""
        memory = extra(run, self.clock)
        error = check()
        if not error <= TOLERANCE:
            raise ArithmeticError(f"{name} is off by {error:.3g} of the largest value")
        self.checks[who, name] = {"error": error, "extra": memory}
        self.runs[who, name] = run

    def kernel(
        self, who: str, kernel: Kernel, passes: tuple[str, ...] = (FORWARD, KV, QUERY)
    ) -> None:
        q, k, v, dout, scale = self.inputs
        work = kernel.works_for(self.case.mask, [(self.case.q_spans, self.case.k_spans)])[0]
        if work is None:
            raise ArithmeticError("sees nothing in this pair")
        scoring = Scoring(scale)
        out, lse = empty_result(q, v.shape[-1])
        run = Run(lambda: kernel.forward(q, k, v, work, scoring, out, lse))
        if FORWARD in passes:
            self.add(who, FORWARD, run, lambda: self.sample.forward_error(out, slice(None)))
        else:
            run.call()
        short = out.to(q.dtype)
        statistics = Statistics(short, lse.clone(), (dout.float() * short.float()).sum(-1))
        self.statistics = self.statistics or statistics
        for name, kept_out in ((KV, short), (QUERY, None)):
            rows = Rows(q, dout, statistics.lse, statistics.delta, kept_out)
            if name in passes:
                self.backward(who, name, kernel, work, scoring, rows)

    def backward(
        self, who: str, name: str, kernel: Kernel, work: Any, scoring: Scoring, rows: Rows
    ) -> None:
        def check() -> float:
            every = slice(None)
            dq, dk, dv = self.sums
            return self.sample.backward_error((dq, dk, dv), (rows.lse, rows.delta), every, every)

        for total in self.sums:
            total.zero_()
        _, k, v, _, _ = self.inputs
        run = Run(lambda: kernel.backward(rows, k, v, work, scoring, *self.sums))
        self.add(who, name, run, check)

    def rival(self, who: str, rival: rivals.Rival) -> None:
        statistics = self.statistics
        calls = rival(self.inputs, self.case)
        state: dict[str, Any] = {}

        def forward() -> None:
            state["state"] = calls.forward()

        def backward() -> None:
            state["grads"] = calls.backward(state["state"])

        self.add(
            who, FORWARD, Run(forward),
            lambda: self.sample.forward_error(calls.read(state["state"]), calls.rows),
        )  # fmt: skip
        self.add(
            who, KV, Run(backward, before=forward),
            lambda: self.sample.backward_error(
                state["grads"], statistics and (statistics.lse, statistics.delta), calls.rows,
                calls.columns,
            ),
        )  # fmt: skip


def measure(cell: Cell, sizes: Sizes, clock: Clock) -> Record:
    """Return the record of one cell: seconds of every round, FLOPs, memory, refusals."""
    forget(clock.device)  # memory of the previous cell
    bench = Bench(cell, sizes.width, clock)
    for who in kernels(clock.device, cell.compiled):
        bench.admit(who, lambda who=who: bench.kernel(who, make(who, *bench.inputs[:3])))
    others = rivals.compiled if cell.compiled else rivals.of
    for who, rival in others(clock.device).items():
        bench.admit(who, lambda who=who, rival=rival: bench.rival(who, rival))
    return timed_record(bench, sizes)


def timed_record(bench: Bench, sizes: Sizes) -> Record:
    """Time all admitted kernels and rivals in turns."""
    cell, clock = bench.cell, bench.clock
    product = matmul(sizes.matmul, clock.device)
    runs = {" | ".join(key): run for key, run in bench.runs.items()}
    times = interleaved(
        {"matmul": product} | runs, clock, sizes.repeats, sizes.patience, product.call
    )
    return {
        "kind": "compiled rivals" if cell.compiled else "attention",
        "case": cell.case.name,
        "heads": list(cell.heads),
        "tokens": cell.tokens,
        "pairs": cell.case.pairs,
        "matmul": {"flops": 2 * sizes.matmul**3, "seconds": times["matmul"]},
        "runs": [
            {"who": who, "pass": name, "flops": flops(cell, bench.width, name),
             "seconds": times[f"{who} | {name}"], **bench.checks[who, name]}
            for who, name in bench.runs
        ],
        "refused": bench.refused,
        "failed": bench.failed,
    }  # fmt: skip


def flops(cell: Cell, width: int, name: str) -> int:
    """Return FLOPs of visible pairs: two products in forward, five in backward."""
    return (2 if name == FORWARD else 5) * 2 * cell.case.pairs * cell.heads[0] * width


def matmul(side: int, device: torch.device) -> Run:
    """Return a square product in bf16 of random numbers; products of zeros take less power."""
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return Run(lambda: torch.mm(a, b, out=out))

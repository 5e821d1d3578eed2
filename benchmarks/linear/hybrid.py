"""Attention of a hybrid stack: gathered keys and values (LASP-2H), or burst, in the same stack.

Three layers of gated delta rule and one of softmax attention, in Qwen3-Next's shapes. Linear layers
scan their states with algorithm "auto"; attention is `mb.attention` with different algorithms.
Compute is a sleep of FLOPs / speed, so only bytes are checked, by comparison with the plan.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import megatron_burst as mb
from benchmarks.cluster import emulated
from benchmarks.cluster.emulated import BACKWARD, visible
from benchmarks.cluster.mail import LINKS, PASSES
from benchmarks.cluster.measure import pairs
from benchmarks.cluster.record import Run, Work, formula

from . import measure, ours, ways
from .settings import Attention, Stack

State = dict[str, Any]
LINEAR_LAYERS, LINEAR_BACKWARD = 3, 2.0


@dataclass
class Sleeping:
    """Kernel that only sleeps for FLOPs / speed; 0.0 for no time."""

    real: Any
    flops_per_pair: float
    speed: float

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, work: Any, *_: Any
    ) -> None:
        self._take(q.shape[2] * visible(work))

    def backward(self, rows: Any, k: torch.Tensor, v: torch.Tensor, work: Any, *_: Any) -> None:
        self._take(BACKWARD * rows.q.shape[2] * visible(work))

    def _take(self, pairs: float) -> None:
        if self.speed:
            time.sleep(pairs * self.flops_per_pair / self.speed)


def load(state: State, stack: Stack, measured: mb.Rates) -> None:
    """Create the linear layers of a stack and drop the previous layers. Collective."""
    grid = measure.groups(state)
    way = ours.way(stack.setting, "auto", grid, measured)
    state["stack"], state["linear"], state["attentions"] = stack, way, {}


def prepare(state: State, attention: Attention, measured: mb.Rates) -> Work:
    """Make the plan of the attention and run the stack once. Collective.

    "auto" chooses by these rates and the speed of compute.
    """
    stack: Stack = state["stack"]
    heads = stack.heads, stack.kv_heads, stack.kv_heads
    q, k, v = (
        torch.zeros(stack.tokens, 1, n, stack.width, dtype=torch.bfloat16, requires_grad=True)
        for n in heads
    )
    rates = measured if attention.algorithm == "auto" else None
    plan = mb.prepare(
        q, k, v, groups=measure.groups(state), algorithm=attention.algorithm, kernel="aten",
        rates=rates, layout="zigzag", head_chunks=attention.head_chunks,
    )  # fmt: skip
    state["attentions"][attention.name] = plan, (q, k, v)
    run = timed(state, attention.name, 0.0)
    flops = 4.0 * stack.width * stack.heads
    passes = (plan.rank_plan.forward, flops), (plan.rank_plan.backward, flops * BACKWARD)
    words = f"{plan.algorithm}, side {plan.schedules[1].side}, {plan.head_chunks} head chunks"
    work = Work(
        {p: {link: getattr(sent, link) for link in LINKS}
         for p, sent in zip(PASSES, plan.traffic(), strict=True)},
        sent={},
        says="" if plan.choice is None else words,
        flops={p: pairs(job) * per_pair for p, (job, per_pair) in zip(PASSES, passes, strict=True)},
    )  # fmt: skip
    if run.counted != formula([work]):
        raise ArithmeticError(f"{attention.name} sent {run.counted}, the plan: {formula([work])}")
    return work


def timed(state: State, name: str, speed: float) -> Run:
    """Run forward and backward of the stack; compute at `speed` FLOP/s, 0.0 for no time."""
    stack: Stack = state["stack"]
    plan, tensors = state["attentions"][name]
    kernel = Sleeping(plan.kernel, 4.0 * stack.width, speed)
    plan = plan.with_kernel(kernel)
    linear: ways.Way = state["linear"]
    local = stack.linear_flops / speed if speed else 0.0
    counters = measure.groups(state).counters
    sent = dict.fromkeys(LINKS, 0)

    def count() -> dict[str, int]:
        return {link: getattr(counters, link) for link in LINKS}

    def attended(counts_before: dict[str, int]) -> None:
        for link, n in count().items():
            sent[link] += n - counts_before[link]

    dist.barrier()
    with emulated.urgent(True):
        begin = measure.together()
        linear_passes = []
        for _ in range(LINEAR_LAYERS):
            time.sleep(local)
            linear_passes.append(ways.reach(linear))
        counts_before = count()
        out = mb.attention(*tensors, plan=plan)
        attended(counts_before)
        forward = begin, time.perf_counter()
        begin = measure.together()
        counts_before = count()
        torch.autograd.grad(out, tensors, out)
        attended(counts_before)
        for leaves, outputs in reversed(linear_passes):
            time.sleep(LINEAR_BACKWARD * local)
            torch.autograd.grad(outputs, leaves, linear.upstream)
        backward = begin, time.perf_counter()
        dist.barrier()
    clock = dict(zip(PASSES, (forward, backward), strict=True))
    return Run(clock, {}, counted=sent, error=0.0, most=0.0)

"""What one rank does in the benchmark: makes plans, runs them timed, checks every result.

`prepare`, `timed` and `transfer` are called on all ranks alike (see `ranks`). A run is a forward
and a backward of the unchanged `mb.attention`, each after a barrier; its result is compared with
that of one rank for the whole sequence before its times are handed back.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import megatron_burst as mb
from megatron_burst.comm.transport import Channel
from megatron_burst.execution.job import Pass
from megatron_burst.tools.trace.local import profiled
from megatron_burst.tools.trace.record import TraceEvent, events_of

from . import emulated, mail, whole
from .cells import Problem, Rival
from .cuts import UNKNOWN, Cut, cut
from .emulated import BACKWARD, EmulatedKernel, Memory, visible
from .mail import LINKS, PASSES
from .network import Network
from .problems import attend
from .record import Run, Work

# Of the largest entry, by what travels on the wire: in fp32 the order of sums differs, bf16 rounds.
TOLERANCE = {"fp32": 2e-5, "bf16": 2e-2}
State = dict[str, Any]


class Share(NamedTuple):
    """What a rank holds of a problem in one layout: q, k, v and dout, and the truth of out, dq, dk
    and dv. The mask is that of all rows of this layout."""

    inputs: tuple[torch.Tensor, ...]
    truth: tuple[torch.Tensor, ...]
    cut: Cut


def write_problem(
    problem: Problem, network: Network, folder: Path, layouts: Sequence[str] = ("zigzag",)
) -> None:
    """Random inputs of the whole sequence and the truth, cut by each of `layouts` into one file per
    rank.

    The truth is torch's own attention over the whole sequence, in one process. Padding holds other
    random inputs and no gradient of its outputs, of which nothing is known.
    """
    generator = torch.Generator().manual_seed(11)
    length, d = problem.tokens * network.size, problem.width
    q, dout = (torch.randn(length, 1, problem.heads, d, generator=generator) for _ in range(2))
    k, v = (torch.randn(length, 1, problem.kv_heads, d, generator=generator) for _ in range(2))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves, problem.mask)
    grads = torch.autograd.grad(out, leaves, dout)
    truth = [out.detach(), *grads]
    assert all(x.isfinite().all() for x in truth)
    others = [torch.randn(x.shape, generator=generator) for x in (q, k, v)]
    whole = list(zip((q, k, v, dout, *truth), (*others, 0.0, UNKNOWN, 0.0, 0.0, 0.0), strict=True))
    cuts = {name: _cut(name, problem, network) for name in layouts}
    for rank in range(network.size):
        found = {}
        for name, each in cuts.items():
            shards = [each.shard(x, rank, padding) for x, padding in whole]
            found[name] = Share(tuple(shards[:4]), tuple(shards[4:]), each)
        torch.save(found, folder / f"{rank}.pt")


def _cut(name: str, problem: Problem, network: Network) -> Cut:
    length = problem.tokens * network.size
    return cut(name, problem.mask, length, network.nodes, network.per_node)


def load(state: State, problem: Problem, folder: Path) -> None:
    """Read this rank's shares of a problem, by layout; forget the one before."""
    state["shares"] = torch.load(folder / f"{state['rank']}.pt", weights_only=False)
    state["problem"], state["plans"], state["memory"] = problem, {}, Memory()


def rates(state: State, speed: float | None) -> mb.Rates:
    """What `mb.measure_rates` finds; compute is emulated at `speed` FLOP/s (0.0: no time), or
    measured where that is None. An emulated call also takes what this rank oversleeps."""
    like = next(iter(state["shares"].values())).inputs[:3] if speed is None else None
    found = mb.measure_rates(_groups(state, 1, "head_first"), like=like)
    if speed is None:
        return found
    launch = emulated.oversleep() if speed else 0.0
    return dataclasses.replace(found, compute=speed or math.inf, launch=launch)


def prepare(state: State, rival: Rival, rates: mb.Rates | None = None) -> Work:
    """Make the plan of a rival, run it once to warm up, and say what it costs. Collective.

    rates: what algorithm "auto" chooses by.
    """
    share = state["shares"][rival.layout]
    plan = _plan(state, rival, share, rates)
    state["plans"][rival.name] = plan, share
    untimed = plan.with_kernel(_emulated(state, plan, None))
    state["memory"].open = True
    problem: Problem = state["problem"]
    run = timed(state, rival.name, 0.0, untimed)
    state["memory"].open = False
    assert run.error <= run.most, f"{rival.name} is off by {run.error:.3g} of the largest entry"
    flops = problem.flops_per_pair / plan.groups.topology.ulysses  # of a share of the heads
    runs = (plan.job.forward, flops), (plan.job.backward, flops * BACKWARD)
    return Work(
        {p: {link: getattr(sent, link) for link in LINKS}
         for p, sent in zip(PASSES, plan.traffic(), strict=True)},
        says=_words(plan) if rival.algorithm == "auto" else "",
        flops={p: pairs(run) * each for p, (run, each) in zip(PASSES, runs, strict=True)},
        **mail.of(plan),
    )  # fmt: skip


def timed(state: State, name: str, speed: float | None, plan: mb.Plan | None = None) -> Run:
    """One forward and backward of a prepared rival; emulated at `speed` FLOP/s, None for real.

    speed 0.0: emulated compute that takes no time.
    """
    known, share = state["plans"][name]
    if plan is None:
        plan = known
        if speed is not None:
            kernel = _emulated(state, plan, speed or None)
            plan = plan.with_kernel(kernel)
    q, k, v, dout = share.inputs
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    counters = plan.groups.counters
    counters.reset()
    network, me = state["network"], state["rank"]
    dist.barrier()
    before = network.sent_from_here(me)
    with emulated.urgent(speed is not None and not state["memory"].open):
        dist.barrier()
        begin = time.perf_counter()
        out = mb.attention(*leaves, plan=plan)
        forward = begin, time.perf_counter()
        dist.barrier()
        begin = time.perf_counter()
        grads = torch.autograd.grad(out, leaves, dout)
        backward = begin, time.perf_counter()
        dist.barrier()
    sent = {link: n - before[link] for link, n in network.sent_from_here(me).items()}
    error = worst_error((out, *grads), share.truth)
    counted = {"intra": counters.intra, "inter": counters.inter}
    most = TOLERANCE[state["problem"].wire]
    return Run({"forward": forward, "backward": backward}, sent, counted, error, most)


def trace(state: State, name: str, speed: float | None) -> tuple[list[TraceEvent], Run]:
    """What this rank did in one timed run, and the run."""
    with tempfile.TemporaryDirectory(prefix="profile-") as folder:
        path = Path(folder) / "profile.json"
        with profiled(path):
            run = timed(state, name, speed)
        events = events_of(json.loads(path.read_text()))
    return [event._replace(rank=state["rank"]) for event in events], run


def worst_error(got: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> float:
    """The largest difference, relative to the largest entry of its tensor; where the truth is
    `UNKNOWN` anything is right."""
    worst = []
    for x, y in zip(got, truth, strict=True):
        known = ~y.isnan()
        worst.append((x.detach() - y)[known].abs().max() / y[known].abs().max())
    return torch.stack(worst).max().item()  # what is no number is not skipped


def transfer(state: State, sizes: dict[str, int]) -> dict[str, tuple[float, float]]:
    """Every rank sends to its neighbour over one link class, then over the other, so many bytes:
    link class -> clock readings. What the links carry when nothing else is asked of them."""
    network, me = state["network"], state["rank"]
    width, ranks = network.per_node, network.size
    node, index = divmod(me, width)
    around = node * width + (index + 1) % width, node * width + (index - 1) % width
    neighbours = {"intra": around, "inter": ((me + width) % ranks, (me - width) % ranks)}
    clock = {}
    for link, (there, back) in neighbours.items():
        if there == me:
            continue
        source, target = (torch.zeros(sizes[link], dtype=torch.uint8) for _ in range(2))
        with emulated.urgent(True):
            dist.barrier()
            begin = time.perf_counter()
            works = [dist.irecv(target, back), dist.isend(source, there)]
            for work in works:
                assert work is not None
                work.wait()
            clock[link] = begin, time.perf_counter()
    return clock


def pairs(run: Pass) -> int:
    """Visible pairs that this rank computes in a pass."""
    return sum(visible(call.work) for step in run.steps for call in step.calls)


def _emulated(state: State, plan: mb.Plan, speed: float | None) -> EmulatedKernel:
    problem: Problem = state["problem"]
    slack = 1e-2 if problem.wire == "fp32" else 0.5
    return EmulatedKernel(plan.kernel, state["memory"], speed, 4 * problem.width, slack)


def _plan(state: State, rival: Rival, share: Share, rates: mb.Rates | None) -> mb.Plan:
    q, k, v = (x.detach().requires_grad_() for x in share.inputs[:3])
    network, problem = state["network"], state["problem"]
    whole.register()
    mask, wire = share.cut.mask, problem.wire
    if rival.ulysses == "chosen":
        assert rates is not None
        choice = mb.choose(
            ranks=network.size, intra=network.per_node, rates=rates, tokens=problem.tokens,
            heads=problem.heads, kv_heads=problem.kv_heads, width=problem.width, itemsize=4,
        )  # fmt: skip
        groups = _groups(state, choice.groups["ulysses"], choice.groups["placement"])
        plan = mb.prepare(
            q, k, v, groups=groups, kernel="aten", mask=mask, layout=share.cut.layout,
            grad_wire_dtype=wire, **choice.call
        )  # fmt: skip
        return dataclasses.replace(plan, choice=choice)
    ulysses = rival.ulysses_size(network.nodes, network.per_node)
    plan = mb.prepare(
        q, k, v, groups=_groups(state, ulysses, rival.placement), algorithm=rival.algorithm,
        side=rival.side, kernel="aten", rates=rates, mask=mask, grad_wire_dtype=wire,
        layout=share.cut.layout,
        head_chunks=None if rival.algorithm == "auto" else rival.head_chunks,
    )  # fmt: skip
    if rival.algorithm == whole.NAME:  # it also sends directly, which the small grid does not show
        plan.groups.connect([Channel("flat", False), Channel("flat", True)], q.device)
    return plan


def _words(plan: mb.Plan) -> str:
    """ "burst, side query, 4 head chunks (predicted: ...)"."""
    assert plan.choice is not None
    taken = plan.choice.taken
    groups = f", {taken.head_chunks} head chunks" * (taken.head_chunks > 1)
    side = f", side {taken.side}" * (taken.algorithm != "ulysses")
    return f"{taken.name}{side}{groups} (predicted: {plan.choice.why})"


def _groups(state: State, ulysses: int, placement: str) -> mb.Groups:
    """A grid, made once per rank's life and in the same order everywhere."""
    network, made = state["network"], state.setdefault("groups", {})
    key = ulysses, placement
    if key not in made:
        made[key] = mb.Groups.from_topology(
            dist.group.WORLD, intra=network.per_node, ulysses=ulysses, placement=placement
        )
    return made[key]

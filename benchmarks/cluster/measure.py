"""Work of one rank in the benchmark: make plans, run them timed, check every result.

`prepare`, `timed` and `transfer` are called on all ranks (see `ranks`). A run is a forward and a
backward of the unchanged `mb.attention`, each after a barrier. Its result is compared with one
rank's result for the whole sequence, within the bounds of `rounding`, before its times count.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import megatron_burst as mb
from megatron_burst.comm.process_groups import new_group, process_group, timeout_of
from megatron_burst.comm.transport import Channel
from megatron_burst.execution.rank_plan import RankPass

from . import emulated, mail, rounding, whole
from .cells import WIRES, Problem, Rival
from .cuts import UNKNOWN, Cut, cut, each_document
from .emulated import BACKWARD, EmulatedKernel, Memory, visible
from .groups import Planned
from .mail import LINKS, PASSES
from .network import Network
from .problems import attend, bounds_of
from .record import Run, Work
from .rounding import Roundings

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FILE = "problem.pt"
State = dict[str, Any]


class Inaccurate(ArithmeticError):
    """Error of a rival whose results are outside the bounds of its roundings."""


class Share(NamedTuple):
    """Tensors of a rank for a problem, or for some of its documents, in one layout.

    The tensors are q, k, v and dout, and the true out, dq, dk and dv. The mask covers all rows of
    the layout.

    Attributes:
        ranks: First rank that holds the rows, and number of these ranks.
        sums: Sums of absolute terms, None without bf16.
        bounds: Bounds of the error of each entry, once a rival is known (`rounding`).
    """

    inputs: tuple[torch.Tensor, ...]
    truth: tuple[torch.Tensor, ...]
    cut: Cut
    ranks: tuple[int, int]
    sums: rounding.Sums | None = None
    bounds: Sequence[torch.Tensor] = ()


def write_problem(problem: Problem, network: Network, folder: Path) -> None:
    """Write inputs, truth and, with bf16, sums of absolute terms (`rounding`) to one file.

    Every rank reads its shares from the file. The truth is torch's own attention over the whole
    sequence, in one process and fp32. Padding holds other random inputs and no gradient; its
    outputs are unknown.
    """
    generator, dtype = torch.Generator().manual_seed(11), DTYPES[problem.dtype]
    length, d = problem.tokens * network.size, problem.width

    def drawn(heads: int) -> torch.Tensor:
        return torch.randn(length, 1, heads, d, generator=generator).to(dtype)

    q, dout = drawn(problem.heads), drawn(problem.heads)
    k, v = drawn(problem.kv_heads), drawn(problem.kv_heads)
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves, problem.mask)
    grads = torch.autograd.grad(out, leaves, dout.float())
    truth = [out.detach(), *grads]
    assert all(x.isfinite().all() for x in truth)
    sums = []
    if "bf16" in (problem.dtype, problem.wire):
        sums = rounding.absolute_sums(q, k, v, dout, truth[0], problem.mask)
    padding_inputs = [drawn(x.shape[2]) for x in (q, k, v)]
    padding = (*padding_inputs, 0.0, UNKNOWN, 0.0, 0.0, 0.0, *(0.0 for _ in sums))
    whole = list(zip((q, k, v, dout, *truth, *sums), padding, strict=True))
    torch.save(whole, folder / FILE)


def load(state: State, problem: Problem, folder: Path) -> None:
    """Open a problem, whose memory all ranks share, and drop the previous one."""
    state["whole"] = torch.load(folder / FILE, mmap=True)
    state["problem"], state["plans"], state["memory"] = problem, {}, Memory()
    state["shares"], state["roundings"] = {}, Roundings()


def shares(state: State, layout: str, plan: Planned | None = None) -> list[Share]:
    """Return this rank's shares in a layout.

    There is one share, or with groups one per micro-batch in which the rank's group has documents.
    """
    network, me, problem = state["network"], state["rank"], state["problem"]
    length = problem.tokens * network.size

    def share(layout_cut: Cut, first: int, size: int) -> Share:
        shards = [layout_cut.shard(x, me - first, padding) for x, padding in state["whole"]]
        sums = rounding.Sums(*shards[8:]) if shards[8:] else None
        return Share(tuple(shards[:4]), tuple(shards[4:8]), layout_cut, (first, size), sums)

    if plan is not None:
        bounds = bounds_of(problem.mask, length)
        assert bounds is not None
        own_parts = [part for parts in plan for part in parts
                     if part.first <= me < part.first + part.size]  # fmt: skip
        return [
            share(each_document(bounds, part.documents, part.size), part.first, part.size)
            for part in own_parts
        ]
    if layout not in state["shares"]:
        layout_cut = cut(layout, problem.mask, length, network.nodes, network.per_node)
        state["shares"][layout] = [share(layout_cut, 0, network.size)]
    return state["shares"][layout]


def rates(state: State, speed: float | None) -> mb.Rates:
    """Return the rates that `mb.measure_rates` measures.

    Args:
        speed: FLOP/s of emulated compute (0.0: no time), None to measure real compute. An emulated
            call also takes this rank's oversleep.
    """
    like = shares(state, "zigzag")[0].inputs[:3] if speed is None else None
    measured = mb.measure_rates(_groups(state, 1, "head_first"), like=like)
    if speed is None:
        return measured
    launch = emulated.oversleep() if speed else 0.0
    return dataclasses.replace(measured, compute=speed or math.inf, launch=launch)


def prepare(
    state: State, rival: Rival, rates: mb.Rates | None = None, groups: Planned | None = None
) -> Work:
    """Make the plans of a rival, run it once to warm up, and return its costs. Collective.

    Args:
        rates: Rates for the choice of algorithm "auto".
        groups: Groups that have their own documents.

    Raises:
        Inaccurate: Results are wrong, on the ranks that have them.
    """
    parts = [(_plan(state, rival, share, rates), share)
             for share in shares(state, rival.layout, groups)]  # fmt: skip
    counts = _roundings(state, [plan for plan, _ in parts])
    parts = [
        (plan, share._replace(
            bounds=rounding.bounds(state["problem"], counts, share.truth, share.sums)))
        for plan, share in parts
    ]  # fmt: skip
    state["plans"][rival.name] = parts
    state["memory"].open = True
    run = timed(state, rival.name, 0.0)
    state["memory"].open = False
    if not run.error <= run.most:
        raise Inaccurate(f"an error is {run.error:.3g} times the bound of its rounding")
    chosen = rival.algorithm == "auto"
    return total_work(
        state["network"].size,
        [(_work(state["problem"], plan, chosen), share.ranks) for plan, share in parts],
    )


def _roundings(state: State, plans: Sequence[mb.Plan]) -> Roundings:
    """Return the largest counts of all ranks and of all rivals so far. Collective.

    Kernel calls of earlier rivals are kept, so their roundings count.
    """
    largest = state["roundings"]
    for plan in plans:
        largest = largest.most(rounding.roundings(plan))
    counts = torch.tensor(largest)
    dist.all_reduce(counts, dist.ReduceOp.MAX)
    state["roundings"] = Roundings(*counts.tolist())
    return state["roundings"]


def _work(problem: Problem, plan: mb.Plan, chosen: bool) -> Work:
    flops = problem.flops_per_pair / plan.groups.topology.ulysses  # for a share of the heads
    runs = (plan.rank_plan.forward, flops), (plan.rank_plan.backward, flops * BACKWARD)
    return Work(
        {p: {link: getattr(sent, link) for link in LINKS}
         for p, sent in zip(PASSES, plan.traffic(), strict=True)},
        says=_words(plan) if chosen else "",
        flops={p: pairs(run) * per_pair for p, (run, per_pair) in zip(PASSES, runs, strict=True)},
        **mail.of(plan),
    )  # fmt: skip


def total_work(size: int, works: Sequence[tuple[Work, tuple[int, int]]]) -> Work:
    """Add the work of one rank (of `size` ranks) over its groups."""
    sent = {p: [0] * size for p in PASSES}
    for work, (first, group_size) in works:
        for p in PASSES:
            for peer in range(group_size):
                sent[p][first + peer] += work.sent[p][peer]

    def by_link(name: str) -> dict[str, dict[str, int]]:
        return {p: {x: sum(getattr(w, name)[p][x] for w, _ in works) for x in LINKS}
                for p in PASSES}  # fmt: skip

    return Work(
        by_link("bytes"), sent, next((work.says for work, _ in works), ""),
        {p: sum(work.flops[p] for work, _ in works) for p in PASSES}, by_link("messages"),
        {p: sum(work.least[p] for work, _ in works) for p in PASSES},
    )  # fmt: skip


def timed(state: State, name: str, speed: float | None) -> Run:
    """Run one forward and backward of a prepared rival.

    If groups have their own documents, the forwards of all micro-batches precede the first
    backward.

    Args:
        speed: FLOP/s of emulated compute, 0.0 for no time, None for real compute.
    """
    parts = state["plans"][name]
    plans = [plan for plan, _ in parts]
    if speed is not None:
        plans = [plan.with_kernel(_emulated(state, plan, speed or None)) for plan in plans]
    leaves_of_part = [[x.detach().requires_grad_() for x in share.inputs[:3]] for _, share in parts]
    all_counters = {id(plan.groups): plan.groups.counters for plan in plans}.values()
    for counters in all_counters:
        counters.reset()
    network, me = state["network"], state["rank"]
    dist.barrier()
    sent_before = network.sent_from_here(me)
    with emulated.urgent(speed is not None and not state["memory"].open):
        dist.barrier()
        begin = time.perf_counter()
        outs = [mb.attention(*leaves, plan=plan)
                for plan, leaves in zip(plans, leaves_of_part, strict=True)]  # fmt: skip
        forward = begin, time.perf_counter()
        dist.barrier()
        begin = time.perf_counter()
        grads_of_part = [
            torch.autograd.grad(out, leaves, share.inputs[3])
            for out, leaves, (_, share) in zip(outs, leaves_of_part, parts, strict=True)
        ]
        backward = begin, time.perf_counter()
        dist.barrier()
    sent = {link: n - sent_before[link] for link, n in network.sent_from_here(me).items()}
    errors = [
        worst_error((out, *grads), share.truth, share.bounds)
        for out, grads, (_, share) in zip(outs, grads_of_part, parts, strict=True)
    ]
    error = torch.tensor([0.0, *errors]).max().item()  # NaN if an error is NaN
    counted = {link: sum(getattr(x, link) for x in all_counters) for link in LINKS}
    return Run({"forward": forward, "backward": backward}, sent, counted, error, most=1.0)


def worst_error(
    results: Sequence[torch.Tensor], truth: Sequence[torch.Tensor], bounds: Sequence[torch.Tensor]
) -> float:
    """Return the largest error over its bound; entries with truth `UNKNOWN` are free."""
    worst = []
    for x, y, bound in zip(results, truth, bounds, strict=True):
        finite = ~y.isnan()
        worst.append(((x.detach() - y) / bound)[finite].abs().max())
    return torch.stack(worst).max().item()  # NaN if an entry is NaN


def transfer(state: State, sizes: dict[str, int]) -> dict[str, tuple[float, float]]:
    """Send `sizes` bytes to a neighbour over one link class, then over the other.

    Return clock readings by link class: the rates of links without other traffic.
    """
    network, me = state["network"], state["rank"]
    width, ranks = network.per_node, network.size
    node, index = divmod(me, width)
    node_neighbours = node * width + (index + 1) % width, node * width + (index - 1) % width
    neighbours = {"intra": node_neighbours, "inter": ((me + width) % ranks, (me - width) % ranks)}
    clock = {}
    for link, (next_rank, previous_rank) in neighbours.items():
        if next_rank == me:
            continue
        source, target = (torch.zeros(sizes[link], dtype=torch.uint8) for _ in range(2))
        with emulated.urgent(True):
            dist.barrier()
            begin = time.perf_counter()
            works = [dist.irecv(target, previous_rank), dist.isend(source, next_rank)]
            for work in works:
                assert work is not None
                work.wait()
            clock[link] = begin, time.perf_counter()
    return clock


def pairs(rank_pass: RankPass) -> int:
    """Return the visible pairs that this rank computes in a pass."""
    return sum(visible(call.work) for step in rank_pass.steps for call in step.calls)


def _emulated(state: State, plan: mb.Plan, speed: float | None) -> EmulatedKernel:
    problem: Problem = state["problem"]
    slack = 1e-2 if problem.wire == "fp32" else 0.5
    return EmulatedKernel(plan.kernel, state["memory"], speed, 4 * problem.width, slack)


def _plan(state: State, rival: Rival, share: Share, rates: mb.Rates | None) -> mb.Plan:
    q, k, v = (x.detach().requires_grad_() for x in share.inputs[:3])
    network, problem = state["network"], state["problem"]
    whole.register()
    mask, wire, (first, size) = share.cut.mask, problem.wire, share.ranks
    if rival.ulysses == "chosen":
        assert rates is not None
        choice = mb.choose(
            ranks=network.size, intra=network.per_node, rates=rates, tokens=problem.tokens,
            heads=problem.heads, kv_heads=problem.kv_heads, width=problem.width,
            itemsize=WIRES[problem.dtype],
        )  # fmt: skip
        groups = _groups(state, choice.groups["ulysses"], choice.groups["placement"])
        plan = mb.prepare(
            q, k, v, groups=groups, kernel="aten", mask=mask, layout=share.cut.layout,
            grad_wire_dtype=wire, **choice.keywords
        )  # fmt: skip
        return dataclasses.replace(plan, choice=choice)
    ulysses = rival.ulysses_size(network.nodes, network.per_node)
    groups = _groups(state, ulysses, rival.placement, first, size)
    plan = mb.prepare(
        q, k, v, groups=groups, algorithm=rival.algorithm,
        side=rival.side, kernel="aten", rates=rates, mask=mask, grad_wire_dtype=wire,
        layout=share.cut.layout,
        head_chunks=None if rival.algorithm == "auto" else rival.head_chunks,
    )  # fmt: skip
    if rival.algorithm == whole.NAME:  # it also sends directly, which the small grid does not show
        plan.groups.connect([Channel("flat", False), Channel("flat", True)], q.device)
    return plan


def _words(plan: mb.Plan) -> str:
    """Return for example "burst, side query, 4 head chunks (predicted: ...)"."""
    assert plan.choice is not None
    chosen = plan.choice.taken
    groups = f", {chosen.head_chunks} head chunks" * (chosen.head_chunks > 1)
    side = f", side {chosen.side}" * (chosen.algorithm != "ulysses")
    return f"{chosen.name}{side}{groups} (predicted: {plan.choice.why})"


def _groups(
    state: State, ulysses: int, placement: str, first: int = 0, size: int | None = None
) -> mb.Groups:
    """Return a grid of all ranks, or of `size` from `first`, created once in one order."""
    network, groups_by_key = state["network"], state.setdefault("groups", {})
    size = size or network.size
    key = ulysses, placement, first, size
    if key not in groups_by_key:
        group, members = process_group(dist.group.WORLD), range(first, first + size)
        if size < network.size:
            # torch names a group by the number of groups of a rank, which differs between ranks
            name = f"ranks {first} to {first + size - 1} of the benchmark"
            group = new_group(members, "gloo", timeout_of(group), name)
        groups_by_key[key] = mb.Groups.from_topology(
            group, intra=min(size, network.per_node), ulysses=ulysses, placement=placement
        )
    return groups_by_key[key]

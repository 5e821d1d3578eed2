# SPDX-License-Identifier: Apache-2.0
"""Checks under torchrun: the results of attention on the process groups, and each ring's speed.

Every rank makes the same input, computes dense attention and its gradients by formula in float64,
and compares its own rows. The ranks share their results, so that all exit with the same status.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import megatron_burst as mb

from ...autotune import measure
from ...comm.communicators import memory_taken
from ...comm.hosts import host_labels, this_host
from ...schedule.algorithms import ALGORITHMS
from ...units import byte_size, grid_of, rate
from ..megatron_arguments import MegatronCommand
from . import machine, report
from .kernels import dense, error
from .report import Finding, note, ok, problem, status
from .sizes import HierarchicalSizes, hierarchical_sizes

ROWS, WIDTH = 8, 16  # per rank; of a head
LIMIT = timedelta(seconds=60)
Value = TypeVar("Value")
TOLERANCE = {torch.float64: 1e-10, torch.bfloat16: 2e-2}  # of the largest value


def run(command: MegatronCommand, gpus_per_node: int | None, as_json: bool) -> int:
    """Join the other processes, check, and report on rank 0. Returns the same status on all."""
    if not machine.launched():
        raise ValueError(
            "--distributed runs on all ranks: torchrun --nproc-per-node N -m megatron_burst doctor "
            "--distributed"
        )
    backend = {"cuda": "nccl", "cpu": "gloo"}[machine.own_device().type]
    dist.init_process_group(backend, timeout=LIMIT)
    try:
        return examine(command, gpus_per_node, as_json)
    finally:
        dist.destroy_process_group()


def examine(command: MegatronCommand, gpus_per_node: int | None, as_json: bool) -> int:
    """Check groups made from the default process group. Returns the same status on all ranks."""
    labels = host_labels(_of_ranks(this_host()))
    described = _of_ranks(machine.describe())
    here = [one | {"host": label} for one, label in zip(described, labels, strict=True)]
    hosts = [one["host"] for one in here]
    per_node = hosts.count(hosts[0]) if gpus_per_node is None else gpus_per_node
    before = memory_taken(machine.own_device())
    groups, sizes = _context_groups(command, per_node)
    findings = list(_nodes(here, per_node))
    findings.append(ok("sizes", f"{grid_of(sizes.intra, sizes.inter)}: {sizes.reason}"))
    findings += _correctness(groups)
    findings += _bandwidths(groups[0][1])
    findings.append(_communicators(groups[0][1], before))
    if dist.get_rank() == 0:
        nodes = {one["host"]: one for one in here}
        shown = report.Report(as_json)
        shown.add(findings)
        shown.end({"nodes": list(nodes.values())})
    return status(findings)


def _context_groups(
    command: MegatronCommand, per_node: int
) -> tuple[list[tuple[str, mb.Groups]], HierarchicalSizes]:
    """The groups that the algorithms need, of this rank's context-parallel ranks; collective."""
    world, tp = dist.get_world_size(), command.tp
    cp = command.cp if command.cp_given else max(1, world // tp)
    sizes = hierarchical_sizes(tp, cp, per_node)
    if cp < 2 or world % (tp * cp):
        raise ValueError(
            f"--tensor-model-parallel-size {tp} x --context-parallel-size {cp} does not fit the "
            f"{world} processes started, or leaves one context-parallel rank; start a multiple "
            "of their product"
        )
    own: Any = None
    for first in range(0, world, tp * cp):  # tensor-parallel ranks next to each other
        for offset in range(tp):
            members = list(range(first + offset, first + tp * cp, tp))
            group = dist.new_group(members, timeout=LIMIT)
            own = group if dist.get_rank() in members else own
    made = [("ring", mb.Groups.from_topology(own, intra=sizes.intra))]
    made.append(("ulysses", mb.Groups.from_topology(own, intra=sizes.intra, ulysses=cp)))
    if not sizes.flat:
        made.append(
            ("hybrid", mb.Groups.from_topology(own, intra=sizes.intra, ulysses=sizes.intra))
        )
    return made, sizes


def _nodes(here: list[dict[str, Any]], per_node: int) -> Iterator[Finding]:
    """The hosts with their GPUs and network interfaces, and whether they differ."""
    hosts = [one["host"] for one in here]
    for host in dict.fromkeys(hosts):
        one = here[hosts.index(host)]
        nics = ", ".join(f"{name} ({speed})" for name, speed in one["nics"].items()) or "none shown"
        shown = f"{hosts.count(host)} ranks, {len(one['gpus'])} GPUs, NICs: {nics}"
        yield ok(f"host {host}", shown)
        if hosts.count(host) != per_node:
            yield note(
                f"host {host}",
                f"{hosts.count(host)} ranks run here, but {per_node} per node are assumed",
                "give --gpus-per-node as it is in the run",
            )
    sets = {(len(one["gpus"]), len(one["nics"])) for one in here}
    if len(sets) > 1:
        yield note("hosts", f"differ in (GPUs, NICs): {sorted(sets)}", "the slowest sets the pace")


def _of_ranks(value: Value) -> list[Value]:
    """The value of every rank."""
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# --- correctness ---------------------------------------------------------------------------


def _correctness(made: list[tuple[str, mb.Groups]]) -> Iterator[Finding]:
    """Every algorithm and side that applies to these groups, compared with dense attention."""
    grids = dict(made)
    ring, algorithms = grids["ring"], list(ALGORITHMS)
    if 1 in (ring.topology.intra_size, ring.topology.inter_size):
        algorithms.remove("double_ring")  # on one level the same as ring
    cases = [(a, side, ring) for a in algorithms for side in ("kv", "query")]
    cases += [(name, "kv", groups) for name, groups in made[1:]]
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float64
    whole, wanted = _oracle(ring.size, dtype)
    for algorithm, side, groups in cases:
        try:
            own = _worst(groups, algorithm, side, whole, wanted), ""
        except Exception as error:
            own = math.inf, f"{type(error).__name__}: {error}"
        of_ranks = _of_ranks(own)
        worst = max(error for error, _ in of_ranks)
        topic = f"attention {algorithm}, side {side}"
        if worst <= TOLERANCE[dtype]:
            yield ok(topic, f"right on all ranks: largest difference {worst:.1e} ({dtype})")
            continue
        bad = [rank for rank, (error, _) in enumerate(of_ranks) if error > TOLERANCE[dtype]]
        said = next((words for _, words in of_ranks if words), f"largest difference {worst:.1e}")
        yield problem(
            topic,
            f"wrong on ranks {bad}: {said}",
            "do not train with it; try NCCL_P2P_DISABLE=1 to tell links from software, report this",
        )


def _oracle(ranks: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(q, k, v, dout), (out, dq, dk, dv), all [S, 1, h, d] on the CPU: causal attention, dense, by
    formula, in float64, a head at a time.
    """
    length, heads = 2 * ROWS * ranks, ranks * math.ceil(4 / ranks)
    draw = torch.Generator().manual_seed(1)
    shape = length, 1, heads, WIDTH
    whole = [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for _ in range(4)]
    q, k, v, dout = whole
    return whole, dense(q, k, v, dout, torch.ones(length, length, dtype=torch.bool).tril())


def _worst(
    groups: mb.Groups, algorithm: Any, side: Any, whole: list[torch.Tensor], wanted: list
) -> float:
    """The largest error of this rank's out, dq, dk, dv, relative to the largest value of each."""
    first, second = groups.rank, 2 * groups.size - 1 - groups.rank  # zigzag, by hand
    rows = torch.cat([torch.arange(i * ROWS, (i + 1) * ROWS) for i in (first, second)])
    q, k, v, dout = (x[rows].to(machine.own_device()) for x in whole)
    for x in (q, k, v):
        x.requires_grad_()
    out = mb.attention(q, k, v, groups=groups, algorithm=algorithm, side=side, layout="zigzag")
    out.backward(dout)
    results = (x.detach().cpu() for x in (out, q.grad, k.grad, v.grad) if x is not None)
    return max(error(got, right[rows], right) for got, right in zip(results, wanted, strict=True))


# --- bandwidth -----------------------------------------------------------------------------


def _bandwidths(groups: mb.Groups) -> Iterator[Finding]:
    """The rate at which each rank sends to its neighbour while all ranks send, per ring."""
    device = machine.own_device()
    for ring in ("intra", "inter"):
        name, route = f"bandwidth {ring}", measure.ring_peers(groups, ring, device)
        if route is None:
            yield note(name, "there is no such ring")
            continue
        _, speeds = measure.link_speeds(groups, route, device)
        rates = sorted(_of_ranks(speeds[groups.rank]))
        low, median = (rate(each, "B/s") for each in (rates[0], rates[len(rates) // 2]))
        yield ok(name, f"{median} per rank and direction (median), slowest {low}")


# --- memory --------------------------------------------------------------------------------


def _communicators(groups: mb.Groups, before: int | None) -> Finding:
    """What the rings used here travel on, and the memory of all that were made, with what their
    first messages took.
    """
    made = groups.communicators.removeprefix("communicators: ")
    what = f"{made}; in Megatron activations travel on its own groups"
    after = memory_taken(machine.own_device())
    if before is not None and after is not None:
        what += f"; all that were made here take {byte_size(after - before)} of GPU memory"
    return note("communicators", what)

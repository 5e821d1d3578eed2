# SPDX-License-Identifier: Apache-2.0
"""Checks under torchrun: results of attention on several ranks, and the bandwidth of each ring.

Every rank makes the same inputs, computes dense attention and its gradients in float64, and
compares its own rows with the results of `mb.attention`. Ranks gather the errors of all ranks, so
that all exit with the same status.
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

ROWS, WIDTH = 8, 16  # rows per rank; width of a head
LIMIT = timedelta(seconds=60)
Value = TypeVar("Value")
TOLERANCE = {torch.float64: 1e-10, torch.bfloat16: 2e-2}  # relative to the largest value


def run(command: MegatronCommand, gpus_per_node: int | None, as_json: bool) -> int:
    """Initialize the default process group, run the checks, and print the report on rank 0.

    Returns:
        Exit status, the same on all ranks.
    """
    if not machine.launched():
        raise ValueError(
            "--distributed must be started on all ranks: torchrun --nproc-per-node N -m "
            "megatron_burst doctor --distributed"
        )
    backend = {"cuda": "nccl", "cpu": "gloo"}[machine.own_device().type]
    dist.init_process_group(backend, timeout=LIMIT)
    try:
        return examine(command, gpus_per_node, as_json)
    finally:
        dist.destroy_process_group()


def examine(command: MegatronCommand, gpus_per_node: int | None, as_json: bool) -> int:
    """Make context-parallel groups from the default process group, check them, and print a report.

    Returns:
        Exit status, the same on all ranks.
    """
    labels = host_labels(_gather(this_host()))
    described = _gather(machine.describe())
    here = [
        host_facts | {"host": label} for host_facts, label in zip(described, labels, strict=True)
    ]
    hosts = [host_facts["host"] for host_facts in here]
    per_node = hosts.count(hosts[0]) if gpus_per_node is None else gpus_per_node
    before = memory_taken(machine.own_device())
    groups, sizes = _context_groups(command, per_node)
    findings = list(_nodes(here, per_node))
    findings.append(ok("sizes", f"{grid_of(sizes.intra, sizes.inter)}: {sizes.reason}"))
    findings += _correctness(groups)
    findings += _bandwidths(groups[0][1])
    findings.append(_communicators(groups[0][1], before))
    if dist.get_rank() == 0:
        nodes = {host_facts["host"]: host_facts for host_facts in here}
        shown = report.Report(as_json)
        shown.add(findings)
        shown.end({"nodes": list(nodes.values())})
    return status(findings)


def _context_groups(
    command: MegatronCommand, per_node: int
) -> tuple[list[tuple[str, mb.Groups]], HierarchicalSizes]:
    """Make the context-parallel groups that the checks use; a collective of all ranks.

    Returns:
        This rank's (name, `Groups`), and the hierarchical sizes of the groups. The names are
            "ring", "ulysses", and on several nodes also "hybrid".
    """
    world, tp = dist.get_world_size(), command.tp
    cp = command.cp if command.cp_given else max(1, world // tp)
    sizes = hierarchical_sizes(tp, cp, per_node)
    if cp < 2 or world % (tp * cp):
        raise ValueError(
            f"--tensor-model-parallel-size {tp} x --context-parallel-size {cp} does not fit the "
            f"{world} processes of --distributed: start a multiple of the product, with at least "
            "two context-parallel ranks"
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
    """Yield a finding per host with its GPUs and network interfaces, and notes if hosts differ."""
    hosts = [host_facts["host"] for host_facts in here]
    for host in dict.fromkeys(hosts):
        host_facts = here[hosts.index(host)]
        nics = (
            ", ".join(f"{name} ({speed})" for name, speed in host_facts["nics"].items())
            or "none found"
        )
        shown = f"{hosts.count(host)} ranks, {len(host_facts['gpus'])} GPUs, NICs: {nics}"
        yield ok(f"host {host}", shown)
        if hosts.count(host) != per_node:
            yield note(
                f"host {host}",
                f"{hosts.count(host)} ranks run on this host, but the checks use {per_node} ranks "
                "per node",
                "set --gpus-per-node to the GPUs per node of your run",
            )
    sets = {(len(host_facts["gpus"]), len(host_facts["nics"])) for host_facts in here}
    if len(sets) > 1:
        yield note(
            "hosts",
            f"numbers of (GPUs, NICs) differ between hosts: {sorted(sets)}",
            "all ranks wait for the slowest host",
        )


def _gather(value: Value) -> list[Value]:
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# --- correctness ---------------------------------------------------------------------------


def _correctness(made: list[tuple[str, mb.Groups]]) -> Iterator[Finding]:
    """Compare attention with dense attention; yield a finding per algorithm and side.

    The side is the tensors that ranks send in backward: "kv" or "query".

    Args:
        made: Name and groups, from `_context_groups`.
    """
    grids = dict(made)
    ring, algorithms = grids["ring"], list(ALGORITHMS)
    if 1 in (ring.topology.intra_size, ring.topology.inter_size):
        algorithms.remove("double_ring")  # the same as ring if there is only one level
    cases = [(a, side, ring) for a in algorithms for side in ("kv", "query")]
    cases += [(name, "kv", groups) for name, groups in made[1:]]
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float64
    inputs, expected = _oracle(ring.size, dtype)
    for algorithm, side, groups in cases:
        try:
            own = _worst(groups, algorithm, side, inputs, expected), ""
        except Exception as error:
            own = math.inf, f"{type(error).__name__}: {error}"
        of_ranks = _gather(own)
        worst = max(error for error, _ in of_ranks)
        topic = f"attention {algorithm}, side {side}"
        if worst <= TOLERANCE[dtype]:
            yield ok(topic, f"correct on all ranks: largest difference {worst:.1e} ({dtype})")
            continue
        bad = [rank for rank, (error, _) in enumerate(of_ranks) if error > TOLERANCE[dtype]]
        text = next(
            (message for _, message in of_ranks if message), f"largest difference {worst:.1e}"
        )
        yield problem(
            topic,
            f"wrong on ranks {bad}: {text}",
            "do not train with this algorithm; repeat with NCCL_P2P_DISABLE=1 to test whether "
            "links are the cause; report this result",
        )


def _oracle(ranks: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the inputs (q, k, v, dout) and results (out, dq, dk, dv) of dense causal attention.

    All tensors are [whole sequence, 1, heads, width] on the CPU. Inputs have `dtype`, results
    float64.
    """
    length, heads = 2 * ROWS * ranks, ranks * math.ceil(4 / ranks)
    draw = torch.Generator().manual_seed(1)
    shape = length, 1, heads, WIDTH
    inputs = [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for _ in range(4)]
    q, k, v, dout = inputs
    return inputs, dense(q, k, v, dout, torch.ones(length, length, dtype=torch.bool).tril())


def _worst(
    groups: mb.Groups, algorithm: Any, side: Any, inputs: list[torch.Tensor], expected: list
) -> float:
    """Run `mb.attention` on this rank's rows, and return the largest relative error of a result.

    Args:
        groups: Ranks over which the sequence is split.
        algorithm: Algorithm of `mb.attention`.
        side: Tensors that ranks send in backward, "kv" or "query".
        inputs: q, k, v, dout of the whole sequence, from `_oracle`.
        expected: out, dq, dk, dv of the whole sequence, from `_oracle`.
    """
    # zigzag, computed without mb.layout
    first, second = groups.rank, 2 * groups.size - 1 - groups.rank
    rows = torch.cat([torch.arange(i * ROWS, (i + 1) * ROWS) for i in (first, second)])
    q, k, v, dout = (x[rows].to(machine.own_device()) for x in inputs)
    for x in (q, k, v):
        x.requires_grad_()
    out = mb.attention(q, k, v, groups=groups, algorithm=algorithm, side=side, layout="zigzag")
    out.backward(dout)
    results = (x.detach().cpu() for x in (out, q.grad, k.grad, v.grad) if x is not None)
    return max(error(got, right[rows], right) for got, right in zip(results, expected, strict=True))


# --- bandwidth -----------------------------------------------------------------------------


def _bandwidths(groups: mb.Groups) -> Iterator[Finding]:
    """Yield a finding per ring: the bandwidth to the next rank while all ranks send."""
    device = machine.own_device()
    for ring in ("intra", "inter"):
        name, route = f"bandwidth {ring}", measure.ring_peers(groups, ring, device)
        if route is None:
            yield note(name, "not measured: the grid has no such ring")
            continue
        _, speeds = measure.link_speeds(groups, route, device)
        rates = sorted(_gather(speeds[groups.rank]))
        low, median = (rate(bandwidth, "B/s") for bandwidth in (rates[0], rates[len(rates) // 2]))
        yield ok(name, f"{median} per rank and direction (median), slowest {low}")


# --- memory --------------------------------------------------------------------------------


def _communicators(groups: mb.Groups, before: int | None) -> Finding:
    """Return a note with the process groups of rings and the GPU memory of this check's groups."""
    made = groups.communicators.removeprefix("communicators: ")
    text = f"{made}; under Megatron, activations are sent on Megatron's own process groups"
    after = memory_taken(machine.own_device())
    if before is not None and after is not None:
        text += f"; all groups of this check use {byte_size(after - before)} of GPU memory"
    return note("communicators", text)

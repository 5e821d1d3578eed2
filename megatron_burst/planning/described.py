# SPDX-License-Identifier: Apache-2.0
"""`Plan.describe`: the description of a plan in one line, for the start of a training run."""

from __future__ import annotations

from typing import Any

from ..kernels import native
from ..layout import Layout, Replicated
from ..schedule import cost
from ..units import byte_size, grid_of
from . import pipeline


def described(plan: Any) -> str:
    """Return one line with the settings of a plan and the bytes that this rank sends per layer.

    The line also has the bytes that backward would send with the other side (queries instead of
    keys and values, or vice versa).
    """
    topology, csrc = plan.groups.topology, native.serves(plan.device.type)
    forward, backward = plan.traffic()
    other_side = "kv" if plan.side == "query" else "query"
    nodes = grid_of(topology.per_node, topology.size // topology.per_node)
    if len(plan.rank_plan.ulysses_links) > 1:
        nodes += f", {topology.ulysses} sharing heads ({topology.placement})"
    words = [f"burst attention: algorithm {plan.algorithm}{_why(plan)}", nodes]
    for name, passes in zip(("forward", "backward"), zip(*plan.passes, strict=True), strict=True):
        if all(schedule.route == "direct" for schedule in passes):
            words.append(f"{name} sent directly")
    runs = (run for chunk in plan.rank_plan.chunks for run in (chunk.forward, chunk.backward))
    if any(step.relays for run in runs for step in run.steps):
        words.append("relays on a stream beside the kernels")
    words.append(f"side {plan.side}")
    if plan.head_chunks > 1:
        words.append(f"{plan.head_chunks} head chunks")
    if len(plan.passes) > 1:
        words.append(f"{len(plan.passes)} row chunks ({_host(plan)})")
    words += [
        f"layout {plan.layout.describe()}{_keys(plan.options.key_layout)}",
        f"kernel {plan.kernel.name}{' with csrc' if csrc else ''}{_passed_over(plan)}",
        f"bytes per layer of rank {plan.groups.rank}: forward {_bytes(forward)}, backward "
        f"{_bytes(backward)} "
        f"(side {other_side} would send {_bytes(plan.traffic(other_side)[1])})",
        f"store {_store(plan)}",
        f"received chunks at most {byte_size(plan.held_bytes)} at a time",
        *filter(None, [plan.groups.communicators]),
    ]
    return " | ".join(words)


def _keys(key_layout: Layout | Replicated | None) -> str:
    if key_layout is None:
        return ""
    if isinstance(key_layout, Replicated):
        return ", all keys on every rank"
    return f", keys {key_layout.describe()}"


def _host(plan: Any) -> str:
    """Return the part of the line about keys in host memory.

    The text has the bytes that this rank sends in a forward with keys in host memory, or the reason
    why such a forward is not possible.
    """
    if plan.host_refusal is not None:
        return f"no keys in host memory: {plan.host_refusal}"
    if plan.groups.topology.ring_size == 1:
        return "no keys in host memory: the ring has one rank"
    return f"forward with keys in host memory {_bytes(plan.traffic(host=True)[0])}"


def _why(plan: Any) -> str:
    if plan.choice is None:
        return ""
    return f" (auto: {plan.choice.why}; {plan.choice.rates.describe()})"


def _passed_over(plan: Any) -> str:
    if plan.options.kernel != "auto" or plan.device.type != "cuda":
        return ""
    return f" (auto: {', '.join(plan.kernel.passed_over) or 'the first choice here'})"


def _store(plan: Any) -> str:
    if not plan.recomputes:
        return "none"
    rank, traffic = plan.rank_plan.ring.rank, cost.Traffic()
    for recompute in plan.recomputes:
        traffic += recompute.traffic(rank, plan.sizes)
    imbalance = pipeline.imbalance(plan.recomputes)
    unequal = f", work of busiest rank {imbalance:.2f} x the mean" if imbalance > 1.05 else ""
    return (
        f"{plan.recomputes[0].keep:g} ({byte_size(plan.store_bytes)} per layer; recompute sends "
        f"{_bytes(traffic)}{unequal})"
    )


def _bytes(traffic: cost.Traffic) -> str:
    return f"{byte_size(traffic.intra)} intra + {byte_size(traffic.inter)} inter"

# SPDX-License-Identifier: Apache-2.0
"""Metrics of attention per log interval, as scalars of TensorBoard and Weights & Biases.

Megatron-LM's own writers (`--tensorboard-dir`, `--wandb-project`) write them at iterations that
`--log-interval` divides. If no writer is configured, nothing is measured. The ranks of a
context-parallel group exchange five numbers per log interval, on the host. Megatron's writers are
on the last rank, so the scalars describe the group of the last rank.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

import torch

from ..comm.groups import Groups
from ..comm.transport import ProcessEndpoint
from ..comm.waits import WaitClock
from ..layout import Span
from ..planning.plan import Plan
from ..schedule.cost import visible_pairs
from . import patching
from .patching import PatchSet


class StepMetrics:
    """Counters of this rank, which `collect` turns into metrics and resets."""

    def __init__(self) -> None:
        self._clock = WaitClock()
        self._groups: list[Groups] = []
        self._pairs_of: dict[int, int] = {}  # visible pairs by identity of the plan
        self._pairs, self._planning = 0, 0.0
        self._sent, self._steps = (0, 0), 0  # sent bytes at the last report; steps since then

    def watch(self, groups: Groups) -> None:
        """Include the sent bytes and the wait times of `groups` in the metrics."""
        self._groups.append(groups)
        for end in (groups.ring, groups.ulysses, groups.grid):
            if isinstance(end, ProcessEndpoint):
                end.clock = self._clock

    def timed(self, build: Callable[[Any], Plan]) -> Callable[[Any], Plan]:
        """Return `build` with a counter of the seconds that a forward waits for plans.

        Args:
            build: Function that returns a plan. It builds the plan, or waits for the thread that
                builds it.
        """

        def timed_build(request: Any) -> Plan:
            begin = time.perf_counter()
            try:
                return build(request)
            finally:
                self._planning += time.perf_counter() - begin

        return timed_build

    def count_forward(self, plan: Plan) -> None:
        """Count the visible pairs of queries and keys of this rank, for one forward of a layer."""
        if plan.identity not in self._pairs_of:
            topology, length = plan.groups.topology, plan.signature[0][0][0] * plan.groups.size
            members = topology.ulysses_group(plan.groups.rank)
            spans = [span for member in members for span in plan.layout.spans(member, length)]
            pairs = visible_pairs(plan.mask, spans, [Span(0, 1, length)])
            self._pairs_of[plan.identity] = pairs
        self._pairs += self._pairs_of[plan.identity]

    def end_step(self) -> None:
        """Count one training iteration."""
        self._steps += 1

    def collect(self) -> dict[str, float]:
        """Return the metrics per iteration since the last call, and reset the counters.

        Ranks of the first group that was passed to `watch` exchange counters (a collective). Bytes
        are sums over ranks, and seconds are maxima over ranks.

        Returns:
            Scalars by name, for TensorBoard; empty if no group is watched.
        """
        if not self._groups:
            return {}
        counters = [groups.counters for groups in self._groups]
        sent = sum(count.intra for count in counters), sum(count.inter for count in counters)
        local = [self._pairs, sent[0] - self._sent[0], sent[1] - self._sent[1],
                 self._planning, self._clock.take()]  # fmt: skip
        gathered = torch.stack(self._groups[0].gather(torch.tensor(local, dtype=torch.float64)))
        pairs, within, between, planning, waited = gathered.T
        steps = max(1, self._steps)
        self._sent, self._steps, self._pairs, self._planning = sent, 0, 0, 0.0
        self._pairs_of.clear()  # packed batches make many plans
        scalars = {
            "bytes-within-nodes": within.sum() / steps,
            "bytes-between-nodes": between.sum() / steps,
            "plan-seconds": planning.max() / steps,
            "wait-seconds": waited.max() / steps,
        }
        if pairs.sum():
            scalars["pairs-busiest-over-mean"] = pairs.max() / pairs.mean()
        return {f"burst/{name}": float(value) for name, value in scalars.items()}


def metrics() -> StepMetrics | None:
    """Return the metrics of this run; None if the run writes no metrics."""
    return patching.run_state().metrics


def start_if_written(patches: PatchSet, args: Any) -> None:
    """Start to count if Megatron-LM's arguments select TensorBoard or Weights & Biases."""
    if getattr(args, "tensorboard_dir", None) or getattr(args, "wandb_project", None):
        patches.run.metrics = patches.run.metrics or StepMetrics()


def patch(patches: PatchSet) -> None:
    """Wrap Megatron-LM's `training_log` to write the metrics of attention too."""
    home = importlib.import_module("megatron.training.training")
    patches.wrap(home, "training_log", ["iteration"], _logging)


def _logging(original: Callable, *args: Any, **named: Any) -> Any:
    result = original(*args, **named)
    measured = metrics()
    if measured is None:
        return result
    measured.end_step()
    megatron = importlib.import_module("megatron.training.global_vars")
    iteration = patching.given_to(original, args, named)["iteration"]
    if iteration % megatron.get_args().log_interval == 0:
        scalars = measured.collect()
        board, wandb = megatron.get_tensorboard_writer(), megatron.get_wandb_writer()
        if board is not None:
            for name, value in scalars.items():
                board.add_scalar(name, value, iteration)
        if wandb is not None and scalars:
            wandb.log(scalars, iteration)
    return result

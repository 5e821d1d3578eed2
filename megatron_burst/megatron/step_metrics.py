# SPDX-License-Identifier: Apache-2.0
"""What attention did since the last log interval, as scalars of TensorBoard and Weights & Biases.

Written with Megatron-LM's own writers at iterations that `--log-interval` divides, if it has one of
them (`--tensorboard-dir`, `--wandb-project`); nothing is measured otherwise. The ranks of a
context-parallel group exchange five numbers per log interval, on the host. Megatron's writers are
on the last rank, so the scalars are those of its group.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

_NOTE = "step metrics"  # a `StepMetrics`, where a writer was asked for


class StepMetrics:
    """The numbers of this rank that were not written yet."""

    def __init__(self) -> None:
        self._clock = WaitClock()
        self._groups: list[Groups] = []
        self._pairs_of: dict[int, int] = {}  # of plans, by their identities
        self._pairs, self._planning = 0, 0.0
        self._sent, self._steps = (0, 0), 0  # bytes that were written already, steps since

    def watch(self, groups: Groups) -> None:
        """Count bytes and waits of these groups too."""
        self._groups.append(groups)
        for end in (groups.ring, groups.ulysses, groups.grid):
            if isinstance(end, ProcessEndpoint):
                end.clock = self._clock

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Around the making of a plan."""
        begin = time.perf_counter()
        yield
        self._planning += time.perf_counter() - begin

    def count_forward(self, plan: Plan) -> None:
        """A layer runs forward by this plan: count what this rank's queries see."""
        if plan.identity not in self._pairs_of:
            topology, length = plan.groups.topology, plan.signature[0][0][0] * plan.groups.size
            members = topology.ulysses_group(plan.groups.rank)
            spans = [span for member in members for span in plan.layout.spans(member, length)]
            pairs = visible_pairs(plan.mask, spans, [Span(0, 1, length)])
            self._pairs_of[plan.identity] = pairs
        self._pairs += self._pairs_of[plan.identity]

    def end_step(self) -> None:
        """An iteration of training is over."""
        self._steps += 1

    def collect(self) -> dict[str, float]:
        """The scalars since the last call, per iteration; empty without a context-parallel group.

        A collective of the first group that is watched.
        """
        if not self._groups:
            return {}
        counters = [groups.counters for groups in self._groups]
        sent = sum(each.intra for each in counters), sum(each.inter for each in counters)
        mine = [self._pairs, sent[0] - self._sent[0], sent[1] - self._sent[1],
                self._planning, self._clock.take()]  # fmt: skip
        gathered = torch.stack(self._groups[0].gather(torch.tensor(mine, dtype=torch.float64)))
        pairs, within, between, planning, waited = gathered.T
        steps = max(1, self._steps)
        self._sent, self._steps, self._pairs, self._planning = sent, 0, 0, 0.0
        self._pairs_of.clear()  # plans of packed batches are many
        found = {
            "bytes-within-nodes": within.sum() / steps,
            "bytes-between-nodes": between.sum() / steps,
            "plan-seconds": planning.max() / steps,
            "wait-seconds": waited.max() / steps,
        }
        if pairs.sum():
            found["pairs-busiest-over-mean"] = pairs.max() / pairs.mean()
        return {f"burst/{name}": float(value) for name, value in found.items()}


def metrics() -> StepMetrics | None:
    """Those of this run; None where no writer was asked for."""
    return patching.notes().get(_NOTE)


def ask(patches: PatchSet, args: Any) -> None:
    """Measure from now on, if Megatron-LM's arguments ask for a writer."""
    if getattr(args, "tensorboard_dir", None) or getattr(args, "wandb_project", None):
        patches.notes.setdefault(_NOTE, StepMetrics())


def patch(patches: PatchSet) -> None:
    """Add to a set of patches what is written beside Megatron-LM's own scalars."""
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

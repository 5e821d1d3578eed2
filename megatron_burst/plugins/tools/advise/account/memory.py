# SPDX-License-Identifier: Apache-2.0
"""The memory account: bytes of one rank by item, over one training step.

Every tensor comes and goes on a `tape` in the order in which the code makes and drops it, so the
peak of each phase, and what it consists of, follow. Tensors of the working set that a kernel makes
inside are counted where they are as long as the rows. Not counted: what CUDA, NCCL and the
allocator take (`Cluster.reserve`), gradients of norms and biases on their way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .....autotune.clusters import Cluster
from ..settings import BYTES, Settings, check
from ..shapes.models import Model
from .operators import B
from .rings import CoreOf, core_of
from .steps import TrainingStep, layers_of
from .tape import Moment, peaks


@dataclass(frozen=True)
class Account:
    """The memory of one rank. states: item -> bytes that are always there; moments: of a step,
    with the states; host: item -> bytes of host memory of this rank.
    """

    model: Model
    run: Settings
    states: Mapping[str, int]
    moments: tuple[Moment, ...]
    host: Mapping[str, int]

    @cached_property
    def peak(self) -> Moment:
        """The moment with most bytes."""
        return max(self.moments, key=lambda moment: moment.bytes)

    @property
    def peaks(self) -> list[Moment]:
        """The moment with most bytes of every phase, in order."""
        return peaks(self.moments)

    @property
    def activations(self) -> int:
        """Bytes of the peak without the states."""
        return self.peak.bytes - sum(self.states.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())


class MemoryLeft(NamedTuple):
    """What is left on a cluster; negative where it does not fit. binds: what is scarcer."""

    device: float
    host: float
    binds: str

    @property
    def fits(self) -> bool:
        return self.device >= 0 and self.host >= 0


def account(model: Model, run: Settings, every: bool = True, core_of: CoreOf = core_of) -> Account:
    """The memory of the rank of a run that takes most. every: all moments, also of layers that are
    like others; a search can do with the peak of each phase. core_of: what core attention holds.
    ValueError for what cannot be.
    """
    check(model, run)
    found = (_of_stage(model, run, stage, every, core_of) for stage in fullest_stages(run))
    return max(found, key=lambda one: one.peak.bytes)


def fullest_stages(run: Settings) -> list[int]:
    """The stages one of which takes most: the first, with most micro-batches in flight, and the
    last, with the LM head; of those between, which may have more layers, the earliest.
    """
    return sorted({0, run.pp - 1, *([1] if run.uneven and run.pp > 2 else [])})


def fit(found: Account, cluster: Cluster) -> MemoryLeft:
    """What an account leaves of a cluster's memory, per GPU."""
    items = found.peak.items
    device = cluster.room - found.peak.bytes
    host = cluster.host_per_rank - found.host_bytes
    largest = max(items, key=items.__getitem__)
    tight = device / max(1, cluster.room) < host / max(1.0, cluster.host_per_rank)
    return MemoryLeft(device, host, f"GPU memory: {largest}" if tight else "host memory")


def _of_stage(model: Model, run: Settings, stage: int, every: bool, core_of: CoreOf) -> Account:
    states, optimizer = states_of(model, run, stage)
    step = TrainingStep(model, run, stage, core_of, every)
    step.run_all()
    host = {
        "layer inputs and store": step.host,
        "keys of other ranks": step.keys_on_host,
        "optimizer": optimizer,
    }
    shown = step.tape.moments if every else peaks(step.tape.moments)
    moments = tuple(Moment(m.phase, {**states, **m.items}) for m in shown)
    return Account(model, run, states, moments, {k: v for k, v in host.items() if v})


def states_of(model: Model, run: Settings, stage: int) -> tuple[dict[str, int], int]:
    """Item -> bytes of what is always there on a rank of a stage; bytes of it on the host.

    With `fsdp` parameters and gradients are shared out as the optimizer is; what of them is whole
    for a while is the step's (`steps`).
    """
    dense, experts = parameters(model, run, stage)
    ranks = run.dp * run.cp
    own = dense / ranks + experts / max(1, ranks / run.ep)
    optimizer = run.optimizer_bytes * (own if run.distributed_optimizer else dense + experts)
    held = own if run.fsdp else dense + experts
    states = {
        "parameters": round(held * B),
        "gradients": round(held * BYTES[run.gradients]),
        "optimizer": round(optimizer * (1 - run.optimizer_offload)),
    }
    return states, round(optimizer) - states["optimizer"]


def parameters(model: Model, run: Settings, stage: int) -> tuple[float, float]:
    """Parameters of one rank of a stage: those that all data-parallel ranks have, and experts."""
    ends = (stage == 0) + (stage == run.pp - 1 and not (model.tied and run.pp == 1))
    shared, experts = ends * model.vocabulary * model.hidden, 0
    norms = model.hidden * (stage == run.pp - 1)  # on every tensor-parallel rank
    for layer in layers_of(model, run, stage):
        found = model.by_layer[layer]
        shared, norms, experts = shared + found[0], norms + found[1], experts + found[2]
    return shared / run.tp + norms, experts / (run.ep * run.tp)


def least_bytes(model: Model, run: Settings) -> float:
    """Return a lower bound on GPU memory in bytes: states, and activations that layers keep."""
    plain = model.attentions == model.mlps == model.layers
    rows, hidden = run.rows, run.rows / run.tp * model.hidden
    out = rows * (model.heads // run.tp) * model.value_dim
    if not plain:
        left = hidden * (1 - run.offload)
    elif run.recompute == "full":
        left = (hidden + run.store * out) * (1 - run.offload)
    else:  # inputs of both norms, queries, results, and what goes into the last product
        ffn = model.top_k * model.ffn if model.experts else model.ffn
        ffn = min(ffn, model.dense_ffn) if model.moe_layers not in (0, model.layers) else ffn
        left = 2 * hidden + rows * (model.heads // run.tp) * model.head_dim + out
        left += rows * ffn / run.tp
    return max(
        sum(states_of(model, run, stage)[0].values()) + 2 * left * len(layers_of(model, run, stage))
        for stage in fullest_stages(run)
    )

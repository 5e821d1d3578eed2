# SPDX-License-Identifier: Apache-2.0
"""The memory account: bytes of one rank by item, over one training step.

The account makes and frees every tensor on a `tape` in the order of the code. The peak of each
phase and its items follow from that. Tensors that a kernel allocates inside are counted if they
have as many rows as its input. Memory of CUDA, NCCL and the allocator (`Cluster.reserve`) and
gradients of norms and biases in transit are not counted.
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
    """The memory of one rank.

    Attributes:
        model: The model.
        run: The run.
        states: Bytes of each item that exists during the whole step.
        moments: The moments of a step, with the states.
        host: Bytes of host memory of this rank by item.
    """

    model: Model
    run: Settings
    states: Mapping[str, int]
    moments: tuple[Moment, ...]
    host: Mapping[str, int]

    @cached_property
    def peak(self) -> Moment:
        """The moment with the most bytes."""
        return max(self.moments, key=lambda moment: moment.bytes)

    @property
    def peaks(self) -> list[Moment]:
        """The moment with the most bytes of each phase, in order."""
        return peaks(self.moments)

    @property
    def activations(self) -> int:
        """Bytes at the peak without the states."""
        return self.peak.bytes - sum(self.states.values())

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory of this rank."""
        return sum(self.host.values())


class MemoryLeft(NamedTuple):
    """The unused memory of a cluster per GPU, in bytes; negative if a run does not fit.

    Attributes:
        device: Bytes of GPU memory.
        host: Bytes of host memory.
        binds: The scarcer of the two, with the largest item of GPU memory.
    """

    device: float
    host: float
    binds: str

    @property
    def fits(self) -> bool:
        """True if a run fits both memories."""
        return self.device >= 0 and self.host >= 0


def account(model: Model, run: Settings, every: bool = True, core_of: CoreOf = core_of) -> Account:
    """Return the account of the rank that needs the most memory.

    Args:
        model: The model.
        run: The run.
        every: Keep all moments and run all layers. False keeps the peak of each phase and skips
            layers that are equal to others; a search needs no more.
        core_of: Returns the memory of core attention.

    Raises:
        ValueError: The model and the run contradict each other.
    """
    check(model, run)
    accounts = (_of_stage(model, run, stage, every, core_of) for stage in fullest_stages(run))
    return max(accounts, key=lambda rank_account: rank_account.peak.bytes)


def fullest_stages(run: Settings) -> list[int]:
    """Return the stages one of which needs the most memory.

    The first stage has the most micro-batches in flight and the last has the LM head. Stages
    between them may have more layers; the earliest of these counts.
    """
    return sorted({0, run.pp - 1, *([1] if run.uneven and run.pp > 2 else [])})


def fit(rank_account: Account, cluster: Cluster) -> MemoryLeft:
    """Return the memory that a run leaves unused on a cluster, per GPU."""
    items = rank_account.peak.items
    device = cluster.room - rank_account.peak.bytes
    host = cluster.host_per_rank - rank_account.host_bytes
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
    """Return the states of a rank of a stage: bytes by item, and bytes on the host.

    With `fsdp`, parameters and gradients are sharded like the optimizer. `steps` counts the
    gathered parameters.
    """
    dense, experts = parameters(model, run, stage)
    ranks = run.dp * run.cp
    own = dense / ranks + experts / max(1, ranks / run.ep)
    optimizer = run.optimizer_bytes * (own if run.distributed_optimizer else dense + experts)
    resident = own if run.fsdp else dense + experts
    states = {
        "parameters": round(resident * B),
        "gradients": round(resident * BYTES[run.gradients]),
        "optimizer": round(optimizer * (1 - run.optimizer_offload)),
    }
    return states, round(optimizer) - states["optimizer"]


def parameters(model: Model, run: Settings, stage: int) -> tuple[float, float]:
    """Return the parameters of one rank of a stage: dense ones and those of its experts.

    All data-parallel ranks have the dense ones.
    """
    ends = (stage == 0) + (stage == run.pp - 1 and not (model.tied and run.pp == 1))
    shared, experts = ends * model.vocabulary * model.hidden, 0
    norms = model.hidden * (stage == run.pp - 1)  # every tensor-parallel rank has them
    for layer in layers_of(model, run, stage):
        counts = model.by_layer[layer]
        shared, norms, experts = shared + counts[0], norms + counts[1], experts + counts[2]
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
    else:  # inputs of both norms, queries, results, and the input of the last product
        ffn = model.top_k * model.ffn if model.experts else model.ffn
        ffn = min(ffn, model.dense_ffn) if model.moe_layers not in (0, model.layers) else ffn
        left = 2 * hidden + rows * (model.heads // run.tp) * model.head_dim + out
        left += rows * ffn / run.tp
    return max(
        sum(states_of(model, run, stage)[0].values()) + 2 * left * len(layers_of(model, run, stage))
        for stage in fullest_stages(run)
    )

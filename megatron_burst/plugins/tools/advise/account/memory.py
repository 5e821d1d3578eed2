# SPDX-License-Identifier: Apache-2.0
"""Memory account: predicted bytes of one rank by item (such as "optimizer") over one training step.

To compute it, every tensor is allocated and freed on a `tape.Tape` (a simulated memory), in the
order of training. The tape records the peak of each phase and the items at the peak. Temporary
tensors of a kernel are counted if they have as many rows as the input of the kernel. Memory of
CUDA, NCCL and the allocator (`Cluster.reserve`) and temporary gradients of norms and biases are not
counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
    """Predicted memory of one rank over one training step, by item.

    Attributes:
        model: Shape of the model.
        run: Settings of the run.
        states: Item ("parameters", "gradients", "optimizer") -> bytes of GPU memory that are
            allocated during the whole step.
        moments: Snapshots of the memory during a step, including `states`.
        host: Item -> bytes of host memory of this rank.
    """

    model: Model
    run: Settings
    states: Mapping[str, int]
    moments: tuple[Moment, ...] = field(repr=False)  # thousands of entries
    host: Mapping[str, int]

    @cached_property
    def peak(self) -> Moment:
        """Snapshot with the most bytes of GPU memory."""
        return max(self.moments, key=lambda moment: moment.bytes)

    @property
    def peaks(self) -> list[Moment]:
        """For each phase, in order, the snapshot with the most bytes of GPU memory."""
        return peaks(self.moments)

    @property
    def activations(self) -> int:
        """Bytes at the peak without `states`."""
        return self.peak.bytes - sum(self.states.values())

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory of this rank."""
        return sum(self.host.values())


class MemoryLeft(NamedTuple):
    """Unused memory per GPU in bytes; negative if a run does not fit.

    Attributes:
        device: Unused bytes of GPU memory.
        host: Unused bytes of host memory, of the share of one GPU.
        binds: Memory with the smaller unused fraction: "host memory", or "GPU memory: " and the
            name of the largest item.
    """

    device: float
    host: float
    binds: str

    @property
    def fits(self) -> bool:
        """True if the run fits into GPU memory and host memory."""
        return self.device >= 0 and self.host >= 0


def account(model: Model, run: Settings, every: bool = True, core_of: CoreOf = core_of) -> Account:
    """Return the predicted memory of the rank that needs the most GPU memory.

    Args:
        model: Shape of the model.
        run: Settings of the run.
        every: Keep all snapshots and simulate all layers. False keeps only snapshots that exceed
            all earlier ones of their phase, and skips layers that cannot set a new peak. This
            suffices for a search.
        core_of: Function that returns the memory of core attention, such as `rings.core_of`.

    Raises:
        ValueError: The settings are impossible for the model.
    """
    check(model, run)
    accounts = (_of_stage(model, run, stage, every, core_of) for stage in fullest_stages(run))
    return max(accounts, key=lambda rank_account: rank_account.peak.bytes)


def fullest_stages(run: Settings) -> list[int]:
    """Return the pipeline stages that may need the most memory.

    The first stage keeps activations of the most micro-batches, and the last stage has the LM head.
    If the first or the last stage has its own number of layers, the second stage is included too.
    """
    return sorted({0, run.pp - 1, *([1] if run.uneven and run.pp > 2 else [])})


def fit(rank_account: Account, cluster: Cluster) -> MemoryLeft:
    """Return the unused memory of a rank during a run on a cluster.

    Args:
        rank_account: Predicted memory of the rank.
        cluster: Cluster of GPUs.
    """
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
    """Return the bytes of a rank's states: in GPU memory by item, and of its optimizer on the host.

    States are parameters, gradients and optimizer states. With `fsdp`, parameters and gradients are
    sharded over the same ranks as optimizer states; the module `steps` counts gathered parameters.
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
    """Return the numbers of dense and of expert parameters on one rank of a pipeline stage.

    Dense parameters except norms are split over tensor-parallel ranks. Experts are split over
    tensor- and expert-parallel ranks.
    """
    ends = (stage == 0) + (stage == run.pp - 1 and not (model.tied and run.pp == 1))
    shared, experts = ends * model.vocabulary * model.hidden, 0
    norms = model.hidden * (stage == run.pp - 1)  # not split over tensor-parallel ranks
    for layer in layers_of(model, run, stage):
        counts = model.by_layer[layer]
        shared, norms, experts = shared + counts[0], norms + counts[1], experts + counts[2]
    return shared / run.tp + norms, experts / (run.ep * run.tp)


def least_bytes(model: Model, run: Settings) -> float:
    """Return a lower bound on GPU memory in bytes: states, and activations saved for backward."""
    plain = model.attentions == model.mlps == model.layers
    rows, hidden = run.rows, run.rows / run.tp * model.hidden
    out = rows * (model.heads // run.tp) * model.value_dim
    if not plain:
        left = hidden * (1 - run.offload)
    elif run.recompute == "full":
        left = (hidden + run.store * out) * (1 - run.offload)
    else:  # inputs of both norms, queries, attention results, and the input of the last product
        ffn = model.top_k * model.ffn if model.experts else model.ffn
        ffn = min(ffn, model.dense_ffn) if model.moe_layers not in (0, model.layers) else ffn
        left = 2 * hidden + rows * (model.heads // run.tp) * model.head_dim + out
        left += rows * ffn / run.tp
    return max(
        sum(states_of(model, run, stage)[0].values()) + 2 * left * len(layers_of(model, run, stage))
        for stage in fullest_stages(run)
    )

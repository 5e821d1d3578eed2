"""How long the states of a step take: gradients summed over ranks, parameters gathered, optimizer.

Three ways. The plain one sums all gradients on every rank and updates all parameters there. The
distributed optimizer scatters the sum over data- and context-parallel ranks, updates a share and
gathers parameters once a step (LoongTrain's hybrid ZeRO). FSDP gathers every layer's parameters
before its forward and again before its backward, and scatters its gradients, in every micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..account.layer import B
from ..clusters import Cluster
from ..settings import BYTES, Settings
from .links import ring_seconds

GRADIENTS, GATHERING, OPTIMIZER = "gradient reduction", "parameter gathering", "optimizer"


def reduced_bytes(held: tuple[float, float], run: Settings) -> tuple[float, float]:
    """Bytes of gradients that a rank has to sum over data- and context-parallel ranks: of dense
    parameters and of experts."""
    dense, experts = held
    return dense * BYTES[run.gradients], experts * BYTES[run.gradients]


def over_ranks(cluster: Cluster, run: Settings, dense: float, experts: float) -> float:
    """Seconds of one all-gather or reduce-scatter of these bytes over the ranks that share them."""
    size = run.dp * run.cp
    each = ring_seconds(cluster, size, run.tp, dense)
    return each + ring_seconds(cluster, max(1, size // run.ep), run.tp * run.ep, experts)


def states_seconds(
    cluster: Cluster, run: Settings, held: tuple[float, float], hiding: tuple[float, float]
) -> Mapping[str, float]:
    """Seconds by part that states cost a stage beyond computing, in one step.

    held: parameters of a rank, dense and of experts, as `memory.parameters` counts them. hiding:
    seconds of a micro-batch's forward and backward on this stage, which transfers run beside: a
    fraction `Cluster.overlap` of them at best.
    """
    there, back = hiding
    gradients = over_ranks(cluster, run, *reduced_bytes(held, run))
    gathered = over_ranks(cluster, run, held[0] * B, held[1] * B)
    times = run.micro_batches if run.fsdp else 1
    if run.fsdp:
        twice = _exposed(cluster, gathered, there) + _exposed(cluster, gathered, back)
        left = max(0.0, back - cluster.overlap * gathered)
        return {
            GRADIENTS: times * _exposed(cluster, gradients, left),
            GATHERING: times * twice,
            OPTIMIZER: optimizer_seconds(cluster, run, held),
        }
    if not run.distributed_optimizer:  # an all-reduce is both
        gradients, gathered = 2 * gradients, 0.0
    return {
        GRADIENTS: _exposed(cluster, gradients, back),
        GATHERING: _exposed(cluster, gathered, there),
        OPTIMIZER: optimizer_seconds(cluster, run, held),
    }


def _exposed(cluster: Cluster, seconds: float, hiding: float) -> float:
    return seconds - min(cluster.overlap * seconds, hiding)


def optimizer_seconds(cluster: Cluster, run: Settings, held: tuple[float, float]) -> float:
    """Seconds of the update: states read and written, gradients read, parameters written. The part
    on the host: gradients go there and parameters come back besides, at the host's rates."""
    dense, experts = held
    size = run.dp * run.cp
    if run.distributed_optimizer or run.fsdp:
        dense, experts = dense / size, experts / max(1, size / run.ep)
    own = dense + experts
    update = own * (2 * run.optimizer_bytes + BYTES[run.gradients] + B)
    on_gpu = (1 - run.optimizer_offload) * update / cluster.gpu.memory_rate
    copied = run.optimizer_offload * own * (BYTES[run.gradients] + B) / cluster.link
    host = run.optimizer_offload * update * cluster.ranks_per_node / cluster.host_update
    return on_gpu + copied + host

"""Ranks of a node, the host memory they share, and the rate of their link; collective."""

from __future__ import annotations

import socket
from typing import Any

import torch

from megatron_burst.megatron.offload.demand import Node
from megatron_burst.recompute.host.limits import host_limit
from megatron_burst.recompute.host.mover import HostMemory
from megatron_burst.recompute.host.rate import copy_rate


def gather(mine: Any) -> list[Any]:
    """Of all ranks of the run, in their order; collective."""
    if not torch.distributed.is_initialized():
        return [mine]
    gathered = [mine] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, mine)
    return gathered


def shared_node(stated: int | None) -> Node:
    """This rank's node; collective, so that all its ranks find the same.

    stated: bytes per node; None for 80 % of what is there.
    """
    host = socket.gethostname()
    limit = stated or host_limit(pinned=torch.cuda.is_available())
    limits = [other for name, other in gather((host, limit)) if name == host]
    return Node(min(limits), len(limits))


def lone_node(stated: int | None) -> Node:
    """The same without asking anybody: as if all ranks of the run were on this node."""
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return Node(stated or host_limit(pinned=torch.cuda.is_available()), ranks)


def measured_rate(host: HostMemory) -> float:
    """Bytes per second of the slower direction while all ranks of a node copy both ways;
    collective."""
    return copy_rate(host, lambda: gather(None))

"""Ranks of a node, the host memory they share, and the rate of their link; collective."""

from __future__ import annotations

import socket
from typing import Any

import torch

from megatron_burst.megatron.offload.demand import Node
from megatron_burst.recompute.host.limits import host_limit
from megatron_burst.recompute.host.mover import HostMemory

_BYTES = 64 << 20  # of one copy that is measured: long enough for a link's full rate
_COPIES = 3  # the first one maps and pins host memory


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
    collective. No more than a quarter of the host memory is used."""
    size = max(1, min(_BYTES, host.limit // 4))
    data = torch.zeros(size, dtype=torch.uint8, device=host.device)
    for _ in range(_COPIES):
        gather(None)  # so that all begin together
        moved = host.move(data)
        moved.release()
        moved.get()
        if data.is_cuda:
            torch.cuda.synchronize()
    rates = [rate for rate in host.rates() if rate is not None]
    return min(rates)

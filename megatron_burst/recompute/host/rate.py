"""What the link to the host carries, measured by copies."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .mover import HostMemory

BYTES = 64 << 20  # of one copy: long enough for a link's full rate
COPIES = 3  # the first one maps and pins host memory


def copy_rate(host: HostMemory, together: Callable[[], object]) -> float:
    """Bytes per second of the slower direction, of copies out and back.

    together: waits for the others that copy, so that all begin at the same time. No more than a
    quarter of the host memory is used.
    """
    size = max(1, min(BYTES, host.limit // 4))
    data = torch.zeros(size, dtype=torch.uint8, device=host.device)
    for _ in range(COPIES):
        together()
        moved = host.move(data)
        moved.release()
        moved.get()
        if data.is_cuda:
            torch.cuda.synchronize()
    rates = [rate for rate in host.rates() if rate is not None]
    return min(rates)

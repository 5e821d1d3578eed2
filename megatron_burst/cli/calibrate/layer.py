"""The memory of one layer's core attention on all ranks, beside `advisor.account.memory`.

That part of a layer is ours; what modules of Megatron hold besides is not run here. Measured where
the allocator tells it, on a GPU.
"""

from __future__ import annotations

from typing import Protocol

import torch

from ...advisor.account.layer import ATTENTION, B, Sizes, core_ops
from ...advisor.account.rings import core_of
from ...advisor.account.tape import Half, Tape
from ...advisor.settings import Settings
from ...advisor.shapes.models import Model
from ...attention import attention
from ...units import byte_size
from .ranks import Ranks

ROWS = {"cuda": 8192, "cpu": 128}  # of a rank


class Meter(Protocol):
    """Tells the most bytes of tensors since `begin`, less those that were there then."""

    def begin(self) -> None: ...

    def peak(self) -> int: ...


class CudaMeter:
    """By the statistics of CUDA's caching allocator."""

    def __init__(self, device: torch.device):
        self.device, self.before = device, 0

    def begin(self) -> None:
        torch.cuda.synchronize(self.device)
        self.before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - self.before


def peaks(ranks: Ranks, model: Model, meter: Meter) -> tuple[float, float]:
    """(measured, as the account has it): the most bytes of one call, forward and backward, of the
    ranks that with most. Collective.

    The first call, which makes communicators and buffers that are kept, does not count.
    """
    rows = ROWS[ranks.device.type]
    heads = model.heads, model.kv_heads, model.kv_heads, model.heads
    q, k, v, dout = (
        torch.rand((rows, 1, n, model.head_dim), device=ranks.device).bfloat16() for n in heads
    )

    def call() -> None:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        attention(*leaves, groups=ranks.groups, algorithm="burst").backward(dout)

    call()
    meter.begin()
    call()
    return max(ranks.each(float(meter.peak()))), accounted(model, run_of(ranks))


def run_of(ranks: Ranks) -> Settings:
    """The run whose layer has this attention: all ranks in one ring."""
    path, rows = "gpu" if ranks.cuda else "cpu", ROWS[ranks.device.type]
    return Settings(rows * ranks.size, cp=ranks.size, intra=ranks.per_node, path=path)


def accounted(model: Model, run: Settings) -> float:
    """The most bytes by the account, beside q, k, v and the gradient of the result."""
    x = Sizes.of(model, run)
    given = {"q2": x.query, "k2": x.keys, "v2": x.values}
    ops = core_ops(x, run.rows, core_of(x, run))
    half, tape = Half(ATTENTION, ops, {name: run.rows * n * B for name, n in given.items()}), Tape()
    half.forward(tape, grad=True)
    half.backward(tape)
    return max(moment.bytes for moment in tape.moments)


def compared(ranks: Ranks, model: Model) -> str:
    """What is said of it; on a GPU only. Collective."""
    if not ranks.cuda:
        return ""
    found, account = peaks(ranks, model, CudaMeter(ranks.device))
    free, total = torch.cuda.mem_get_info(ranks.device)
    others = max(ranks.each(float(total - free - torch.cuda.memory_reserved(ranks.device))))
    return (
        f"attention of {ROWS['cuda']} rows took {byte_size(found)}, {found / account:.3f} of the "
        f"account; {byte_size(others)} of the GPU were taken beside tensors"
    )

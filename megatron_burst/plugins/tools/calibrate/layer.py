# SPDX-License-Identifier: Apache-2.0
"""The memory of one layer's core attention on all ranks, beside `tools.advise.account.memory`.

Core attention is the part of a layer that this package provides; Megatron's modules do not run
here. The command measures it on a GPU, from the statistics of the caching allocator.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ....attention import attention
from ....units import byte_size
from ..advise.account.operators import ATTENTION, B, LayerSizes, core_ops
from ..advise.account.rings import core_of
from ..advise.account.tape import Half, Tape
from ..advise.settings import Settings
from ..advise.shapes.models import Model
from .ranks import Ranks

ROWS = {"cuda": 8192, "cpu": 128}  # of a rank


Peak = Callable[[Callable[[], object]], int]  # the peak bytes of tensors that a call makes


def cuda_peak(call: Callable[[], object]) -> int:
    """By the statistics of CUDA's caching allocator."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def peaks(ranks: Ranks, model: Model, peak_of: Peak) -> tuple[float, float]:
    """(measured, as the account has it): the peak bytes of one call, forward and backward, of the
    rank with the highest peak. Collective.

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
    return max(ranks.each(float(peak_of(call)))), accounted(model, run_of(ranks))


def run_of(ranks: Ranks) -> Settings:
    """The run whose layer has this attention: all ranks in one ring."""
    path, rows = "gpu" if ranks.cuda else "cpu", ROWS[ranks.device.type]
    return Settings(rows * ranks.size, cp=ranks.size, intra=ranks.per_node, path=path)


def accounted(model: Model, run: Settings) -> float:
    """The most bytes by the account, beside q, k, v and the gradient of the result."""
    x = LayerSizes.of(model, run)
    given = {"q2": x.query, "k2": x.keys, "v2": x.values}
    ops = core_ops(x, run.rows, core_of(x, run))
    half, tape = Half(ATTENTION, ops, {name: run.rows * n * B for name, n in given.items()}), Tape()
    half.forward(tape, grad=True)
    half.backward(tape)
    return max(moment.bytes for moment in tape.moments)


def compared(ranks: Ranks, model: Model) -> str:
    """A line on how they compare, for the cluster file; on a GPU only. Collective."""
    if not ranks.cuda:
        return ""
    measured, account = peaks(ranks, model, cuda_peak)
    free, total = torch.cuda.mem_get_info(ranks.device)
    others = max(ranks.each(float(total - free - torch.cuda.memory_reserved(ranks.device))))
    return (
        f"attention of {ROWS['cuda']} rows took {byte_size(measured)}, {measured / account:.3f} of "
        f"the account; {byte_size(others)} of the GPU were taken beside tensors"
    )

"""Attention over a ring: forward, and backward with either side, written once.

What to compute at each pair, and what comes of it; which chunk is where at what time is the
walk's. Does not know layouts, masks or algorithms: those are in the program and in each pair's
work. Both are generators, as `walk` explains.

Shape letters: s local rows, b batch, h query heads, k key/value heads, d width, w value width.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch

from ..comm.transport import Endpoint
from ..kernels.base import Kernel, Rows, Scoring
from ..kernels.online_softmax import add_sink_, empty_result
from ..schedule.tables import Chunk, Pair
from .executor import Pass, Tensors, Walk

Keys = tuple[torch.Tensor, torch.Tensor]


def forward(
    run: Pass,
    endpoint: Endpoint,
    kernel: Kernel,
    q: torch.Tensor,
    keys: Keys,
    scoring: Scoring,
    sink: torch.Tensor | None,
) -> Generator[None, None, tuple[torch.Tensor, torch.Tensor, list[Keys]]]:
    """Attention of the local queries to the keys of all ranks (Algorithm 1 of BurstEngine).

    q [s, b, h, d], keys (k [s, b, k, d], v [s, b, k, w]), contiguous; sink [h] or None: a logit
    every row sees besides its keys, with no value. Returns out [s, b, h, w] in the dtype of q,
    lse [s, b, h] in the accumulation dtype, and the keys to be kept for backward.
    """
    out, lse = empty_result(q, keys[1].shape[-1])
    walk = Walk(run, endpoint, {Chunk("kv", endpoint.rank): keys}, None)

    def compute(pair: Pair) -> None:
        k, v = walk.held[Chunk("kv", pair.key)].tensors
        kernel.forward(q, k, v, run.works[pair], scoring, out, lse)

    yield from walk.steps(compute)
    if sink is not None:
        add_sink_(out, lse, sink)
    kept = [walk.held[chunk].tensors for chunk in run.kept]
    return out.to(q.dtype), lse, [(k, v) for k, v in kept]


def backward(
    run: Pass,
    endpoint: Endpoint,
    kernel: Kernel,
    rows: Rows,
    keys: Keys,
    kept: Sequence[Keys],
    scoring: Scoring,
    wire: torch.dtype | None,
    needs_grad: tuple[bool, bool, bool],
) -> Generator[None, None, tuple[torch.Tensor | None, ...]]:
    """Gradients of the local q, k, v in the accumulation dtype, None where not needed.

    Which side travels is the program's business: own chunks are held from the start, visiting
    ones arrive or were `kept`, and gradients are summed per chunk wherever it is. `rows` is the
    local query chunk, `keys` the local (k, v). Source: Algorithms 1 and 2 of BurstEngine.
    """
    me = endpoint.rank
    held: dict[Chunk, Tensors] = {Chunk("query", me): tuple(rows[:4]), Chunk("kv", me): keys}
    walk = Walk(run, endpoint, held | dict(zip(run.kept, kept, strict=True)), wire)
    _, *kv_needs = needs_grad
    walk.track("dquery", [rows.q.shape] * needs_grad[0])
    walk.track("dkv", [t.shape for t, needed in zip(keys, kv_needs, strict=True) if needed])

    def compute(pair: Pair) -> None:
        q, dout, lse, delta = walk.held[Chunk("query", pair.query)].tensors
        out = rows.out if pair.query == me else None
        sums = iter(walk.total(Chunk("dquery", pair.query)) + walk.total(Chunk("dkv", pair.key)))
        grads = [next(sums) if needed else None for needed in needs_grad]
        k, v = walk.held[Chunk("kv", pair.key)].tensors
        kernel.backward(Rows(q, dout, lse, delta, out), k, v, run.works[pair], scoring, *grads)

    yield from walk.steps(compute)
    sums = iter(walk.total(Chunk("dquery", me)) + walk.total(Chunk("dkv", me)))
    return tuple(next(sums) if needed else None for needed in needs_grad)

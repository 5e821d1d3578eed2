# SPDX-License-Identifier: Apache-2.0
"""What launching takes of a rank's processor: `HostTime`, figure by figure.

Timed is the thread that launches until a call returns: on a GPU by the wall clock, as nothing waits
for a device with little to do; on a CPU by the thread's own time, without what it waits for there.
Tensors are small, since launches take as long for large ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np
import torch
from torch.nn.functional import layer_norm, linear, silu

from ....attention import attention
from ....autotune.host_time import BACKWARD
from ....autotune.measure import FLAT, SMALL, Peers, settle, starter
from ....layout import make
from ....masks import Causal, Documents
from ....planning.prepare import prepare
from ..advise.shapes.models import Model
from .kernels import EMPTY, dtype, heads, tile
from .ranks import Measured, Ranks, middle, repeated

WIDTH, HEADS = 64, 4  # of the layer
ROWS = 64  # of a rank's attention
DOCUMENTS, LENGTH = 100, 1024  # in a pack that is planned for; rows of a rank


def launches(ranks: Ranks, model: Model) -> dict[str, Measured]:
    """The fields of `HostTime`; collective. Without other ranks nothing is exchanged."""
    forward, backward, layer = middle(ranks.locally("launches", lambda: _alone(ranks, model)))
    ring = repeated(ranks.rounds(_ring(ranks, model)), "")
    rest = f"an attention call on {ranks.size} ranks, less its calls and exchanges"
    how = f"{EMPTY} rows, forward and backward / {1 + BACKWARD:g}"
    found = {
        "call": Measured((forward + backward) / (1 + BACKWARD), None, how),
        "layer": Measured(layer / 2, None, "a plain layer, forward and backward / 2"),
    }
    moved = 0.0
    if ranks.size > 1:
        found["exchange"] = repeated(ranks.rounds(_exchange(ranks)), f"{SMALL} bytes")
        moved = (ranks.size - 1) * found["exchange"].value
        drawn = f"{DOCUMENTS} documents in {LENGTH} rows of a rank, others each time"
        found["plan"] = repeated(ranks.rounds(_planning(ranks, model)), drawn)
    start = max(0.0, ring.value - ranks.size * forward - moved)
    return found | {"start": Measured(start, None, rest + ring.how)}


def _taken(ranks: Ranks, call: Callable[[], object]) -> float:
    """Seconds of the launching thread in one call, begun on an idle device."""
    settle(ranks.device)
    clock = time.perf_counter if ranks.cuda else time.thread_time
    begun = clock()
    call()
    return clock() - begun


def _alone(ranks: Ranks, model: Model) -> list[float]:
    """What a rank launches without others: forward and backward of a call, and both of a layer."""
    calls = tile(ranks, model, EMPTY)
    each = calls.forward, calls.backward, _Layer(ranks).both
    return [median(ranks.times(partial(_taken, ranks, call))) for call in each]


class _Layer:
    """A layer without its core attention, as few operators as one can have: two norms, four
    products, rope, activation, residuals.
    """

    def __init__(self, ranks: Ranks):
        like = {"device": ranks.device, "dtype": dtype(ranks)}
        shapes = (3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 2 * WIDTH)
        self.weights = [torch.zeros(shape, **like, requires_grad=True) for shape in shapes]
        self.x, self.gain = torch.zeros((EMPTY, WIDTH), **like), torch.ones(WIDTH, **like)
        self.turn = torch.ones(WIDTH // HEADS, **like)
        self.x.requires_grad_()

    def both(self) -> None:
        """Forward and backward."""
        into, out, up, down = self.weights
        shape, x = (WIDTH,), self.x
        qkv = linear(layer_norm(x, shape, self.gain), into).view(EMPTY, 3, HEADS, -1)
        q, k, v = (self._turned(qkv[:, 0]), self._turned(qkv[:, 1]), qkv[:, 2])
        x = x + linear((q + k + v).reshape(EMPTY, WIDTH), out)  # where attention would be
        gate, value = linear(layer_norm(x, shape, self.gain), up).chunk(2, dim=-1)
        x = x + linear(silu(gate) * value, down)
        x.backward(torch.ones_like(x))

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        """With rope."""
        left, right = x.chunk(2, dim=-1)
        return x * self.turn + torch.cat((-right, left), dim=-1) * self.turn


def _ring(ranks: Ranks, model: Model) -> Callable[[], float]:
    """Times the forward of a ring of all ranks, whose plan is made."""
    like = {"device": ranks.device, "dtype": dtype(ranks)}
    h, n = heads(model, ranks)
    q, k, v = (torch.zeros((ROWS, 1, each, model.head_dim), **like) for each in (h, n, n))
    plan = prepare(q, k, v, groups=ranks.groups, algorithm="ring", side="kv")
    return lambda: _taken(ranks, lambda: attention(q, k, v, plan=plan))


def _planning(ranks: Ranks, model: Model) -> Callable[[], float]:
    """Times layout and plan of a pack of documents, whose lengths are others each time."""
    (h, n), drawn = heads(model, ranks), np.random.default_rng(0)
    seq = ranks.size * LENGTH

    def plan() -> None:
        cuts = np.sort(drawn.choice(np.arange(1, seq), DOCUMENTS - 1, replace=False))
        bounds = [0, *cuts.tolist(), seq]
        layout = make("balanced", cp_size=ranks.size, cu_seqlens=bounds, per_node=ranks.per_node)
        prepare(
            groups=ranks.groups, shape=(LENGTH, 1, h, model.head_dim), kv_heads=n,
            dtype=dtype(ranks), device=ranks.device, mask=Documents(bounds) & Causal(),
            layout=layout,
        )  # fmt: skip

    return lambda: _taken(ranks, plan)


def _exchange(ranks: Ranks) -> Callable[[], float]:
    """Times starting an exchange with both neighbours on the ring of all ranks."""
    groups, me = ranks.groups, ranks.groups.rank
    peers = Peers(groups.ring, FLAT, (((me + 1) % ranks.size, (me - 1) % ranks.size),))
    groups.connect([FLAT], ranks.device)
    start = starter(peers, SMALL, ranks.device)

    def once() -> float:
        pending = []
        took = _taken(ranks, lambda: pending.append(start()))
        pending[0].wait()
        return took

    return once

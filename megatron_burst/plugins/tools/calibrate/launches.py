# SPDX-License-Identifier: Apache-2.0
"""Measurements of the host's time to launch work on a device: the fields of `HostTime`.

The time of the launching thread is measured until a call returns. With a GPU it is wall-clock time;
the device is idle before the call, so the thread does not wait for the device. With a CPU it is the
CPU time of the thread. Tensors are small, because launch times do not depend on their sizes.
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
from .ranks import Measurement, Ranks, middle, repeated

WIDTH, HEADS = 64, 4  # hidden size and heads of the layer
ROWS = 64  # rows per rank of the attention call
DOCUMENTS, LENGTH = 100, 1024  # number of documents of a pack, and rows of a pack per rank


def launches(ranks: Ranks, model: Model) -> dict[str, Measurement]:
    """Measure the fields of `HostTime`. A collective call.

    With only one rank, `exchange` and `plan` are not measured.

    Returns:
        Field of `HostTime` -> measurement.
    """
    forward, backward, layer = middle(ranks.locally("launches", lambda: _alone(ranks, model)))
    ring = repeated(ranks.rounds(_ring(ranks, model)), "")
    start_method = f"an attention call on {ranks.size} ranks, minus its kernel calls and exchanges"
    call_method = f"{EMPTY} rows, forward and backward / {1 + BACKWARD:g}"
    measurements = {
        "call": Measurement((forward + backward) / (1 + BACKWARD), None, call_method),
        "layer": Measurement(layer / 2, None, "a plain layer, forward and backward / 2"),
    }
    moved = 0.0
    if ranks.size > 1:
        measurements["exchange"] = repeated(ranks.rounds(_exchange(ranks)), f"{SMALL} bytes")
        moved = (ranks.size - 1) * measurements["exchange"].value
        pack = f"{DOCUMENTS} documents in {LENGTH} rows per rank, new lengths each time"
        measurements["plan"] = repeated(ranks.rounds(_planning(ranks, model)), pack)
    start = max(0.0, ring.value - ranks.size * forward - moved)
    return measurements | {"start": Measurement(start, None, start_method + ring.method)}


def _taken(ranks: Ranks, call: Callable[[], object]) -> float:
    """Return the seconds until one call returns. The device is idle before the call."""
    settle(ranks.device)
    clock = time.perf_counter if ranks.cuda else time.thread_time
    begun = clock()
    call()
    return clock() - begun


def _alone(ranks: Ranks, model: Model) -> list[float]:
    """Return three launch times of this rank in seconds, without communication.

    They are of forward and of backward of attention, and of both passes of a layer without
    attention.
    """
    calls = tile(ranks, model, EMPTY)
    launched = calls.forward, calls.backward, _Layer(ranks).passes
    return [median(ranks.times(partial(_taken, ranks, call))) for call in launched]


class _Layer:
    """Small transformer layer without core attention, whose launch time is measured.

    It has norms, four matrix products, rotary embedding, activation and residual connections.
    """

    def __init__(self, ranks: Ranks):
        like = {"device": ranks.device, "dtype": dtype(ranks)}
        shapes = (3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 2 * WIDTH)
        self.weights = [torch.zeros(shape, **like, requires_grad=True) for shape in shapes]
        self.x, self.gain = torch.zeros((EMPTY, WIDTH), **like), torch.ones(WIDTH, **like)
        self.turn = torch.ones(WIDTH // HEADS, **like)
        self.x.requires_grad_()

    def passes(self) -> None:
        """Run the layer's forward and backward."""
        into, out, up, down = self.weights
        shape, x = (WIDTH,), self.x
        qkv = linear(layer_norm(x, shape, self.gain), into).view(EMPTY, 3, HEADS, -1)
        q, k, v = (self._turned(qkv[:, 0]), self._turned(qkv[:, 1]), qkv[:, 2])
        x = x + linear((q + k + v).reshape(EMPTY, WIDTH), out)  # in place of attention
        gate, value = linear(layer_norm(x, shape, self.gain), up).chunk(2, dim=-1)
        x = x + linear(silu(gate) * value, down)
        x.backward(torch.ones_like(x))

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the rotary embedding."""
        left, right = x.chunk(2, dim=-1)
        return x * self.turn + torch.cat((-right, left), dim=-1) * self.turn


def _ring(ranks: Ranks, model: Model) -> Callable[[], float]:
    """Return a function that measures how many seconds launching forward on a ring takes.

    The ring has all ranks. Its plan is made before the measurement.
    """
    like = {"device": ranks.device, "dtype": dtype(ranks)}
    h, n = heads(model, ranks)
    q, k, v = (torch.zeros((ROWS, 1, count, model.head_dim), **like) for count in (h, n, n))
    plan = prepare(q, k, v, groups=ranks.groups, algorithm="ring", side="kv")
    return lambda: _taken(ranks, lambda: attention(q, k, v, plan=plan, label="launch"))


def _planning(ranks: Ranks, model: Model) -> Callable[[], float]:
    """Return a function that measures how many seconds layout and plan of a random pack take."""
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
    """Return a function that measures how many seconds it takes to start an exchange.

    The exchange is with both neighbours.
    """
    groups, me = ranks.groups, ranks.groups.rank
    peers = Peers(groups.ring, FLAT, (((me + 1) % ranks.size, (me - 1) % ranks.size),))
    groups.connect([FLAT], ranks.device)
    start = starter(peers, SMALL, ranks.device)

    def once() -> float:
        pending = []
        seconds = _taken(ranks, lambda: pending.append(start()))
        pending[0].wait()
        return seconds

    return once

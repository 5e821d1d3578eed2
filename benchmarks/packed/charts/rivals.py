"""Times of the rivals of MagiAttention's benchmark, by the package's simulator and exchanges.

They cut every document into 2 x ranks mirrored pieces, so all ranks do the same work. A pass
consists of one rank's pairs, and hops of its ring or all-to-alls. Their kernel is FlashAttention 3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from megatron_burst.autotune.candidates import sharing
from megatron_burst.autotune.prepared import PreparedSchedule
from megatron_burst.autotune.rates import Rates
from megatron_burst.autotune.simulator import pass_time
from megatron_burst.schedule import rings
from megatron_burst.schedule.demand import all_visible
from megatron_burst.schedule.sizes import Sizes
from megatron_burst.schedule.tables import Grid
from megatron_burst.schedule.topology import Topology

from .documents import area
from .kernel import FLOPS, HEADS, KV_HEADS, TOKENS, WIDTH, Kernel, kernels

NODE = 8
PASSES = ("fwd", "bwd")
RIVALS = ("ring_p2p", "ulysses", "allgather", "usp", "loongtrain")


@dataclass(frozen=True)
class Constants:
    """Constants that are fitted to the charts.

    Attributes:
        intra, inter: Bytes per second of a rank within a node and between nodes.
        start: Seconds of an all-to-all or a gather in addition to its bytes.
        forward, backward: Seconds of every ring step in addition to its kernel call.
    """

    intra: float = 250e9
    inter: float = 45e9
    start: float = 3e-4
    forward: float = 9e-4
    backward: float = 1.3e-3

    def rates(self, backward: bool) -> Rates:
        """Return rates for a ring's pass."""
        step = self.backward if backward else self.forward
        return Rates(self.intra, self.inter, latency=1e-5, launch=step,
                     exchange_start=self.start)  # fmt: skip


LOW = Constants(150e9, 15e9, 1e-5, 5e-5, 5e-5)
HIGH = Constants(450e9, 50e9, 2e-3, 4e-3, 6e-3)


def sizes(wire: int = 2, tokens: int = TOKENS) -> Sizes:
    """Return the sizes of a rank; `wire` is the bytes of a gradient element that is sent."""
    return Sizes(tokens, 1, HEADS, KV_HEADS, WIDTH, WIDTH, itemsize=2, stat_itemsize=4,
                 wire_itemsize=wire, needs_grad=(True, True, True))  # fmt: skip


@cache
def _ring(nodes: int, width: int, backward: bool, tokens: int) -> PreparedSchedule:
    """Return a flat ring of whole chunks over a grid."""
    grid, size = Grid(nodes, width), nodes * width
    own = sizes()
    visibility = all_visible(size, tokens)
    if backward:
        return PreparedSchedule(
            rings.backward("ring", grid, "kv", visibility=visibility, row_bytes=own.backward)
        )
    return PreparedSchedule(
        rings.forward("ring", grid, visibility=visibility, row_bytes=own.forward)
    )


def _ring_seconds(
    kernel: Kernel, lengths: np.ndarray, causal: bool, size: int, share: int
) -> np.ndarray:
    """Return seconds [size, size] of the pairs of two ranks; `share` ranks split the heads."""
    if size == 1:
        return np.array([[kernel.own(lengths, causal).sum() / share]])
    piece = lengths / size
    off = kernel.rectangle(piece, piece / 2) if causal else kernel.rectangle(piece, piece)
    pair_seconds = np.full((size, size), off.sum())
    np.fill_diagonal(pair_seconds, kernel.own(piece, causal).sum())
    return pair_seconds / share


def seconds(
    rival: str, ranks: int, lengths: np.ndarray, causal: bool, backward: bool, fitted: Constants
) -> float:
    """Return seconds of one pass over these documents, on nodes of 8."""
    kernel, rates = kernels("FA3")[backward], fitted.rates(backward)
    tokens, lengths = int(lengths.sum()) // ranks, lengths.astype(float)
    if rival == "allgather":
        return _gathered(kernel, ranks, lengths, causal, backward, fitted)
    # Ranks that share heads: eight of a node (USP, LoongTrain), all (Ulysses), none (ring).
    ulysses = {"ulysses": ranks, "ring_p2p": 1}.get(rival, min(ranks, NODE))
    topology = Topology(ranks, NODE, ulysses)
    own = sizes(tokens=tokens).shared(ulysses)
    nodes, width = (ranks // ulysses, 1) if ulysses > 1 else (ranks // NODE, NODE)
    work = _ring_seconds(kernel, lengths, causal, nodes * width, ulysses)
    if nodes * width == 1:
        rates = replace(rates, launch=0.0)  # one call needs no correction
    ring = pass_time(_ring(nodes, width, backward, own.tokens), own, work, rates)
    return ring.seconds + sharing(topology, own, rates)[backward].seconds


def _gathered(
    kernel: Kernel, ranks: int, lengths: np.ndarray, causal: bool, backward: bool,
    fitted: Constants,
) -> float:  # fmt: skip
    """Return seconds if all keys are gathered before compute and gradients are summed after it."""
    family = sizes().backward.dkv if backward else sizes().forward.kv
    shard = float(lengths.sum()) / ranks * family
    nodes = max(1, ranks // NODE)
    within = (ranks - 1) * shard / fitted.intra
    between = (nodes - 1) * shard / fitted.inter
    piece = lengths / (2 * ranks)
    # The mean number of keys of two mirrored pieces.
    keys = lengths * (0.5 + 0.25 / ranks if causal else 1.0)
    work = 2 * float(kernel.rectangle(piece, keys).sum())
    return max(within, between) + fitted.start + work


def speed(
    rival: str, ranks: int, lengths: np.ndarray, causal: bool, backward: bool, fitted: Constants
) -> float:
    """Return TFLOP/s per GPU in visible pairs."""
    run_seconds = seconds(rival, ranks, lengths, causal, backward, fitted)
    return FLOPS[backward] * area(lengths, causal) / ranks / run_seconds / 1e12

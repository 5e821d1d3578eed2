"""A pack over all ranks in one layout, by the package's simulator: the choice of `auto`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_burst.autotune.pair_counts import pairs_seen
from megatron_burst.autotune.simulator import PassTime, pass_time
from megatron_burst.layout import Layout
from megatron_burst.masks import Causal, Documents
from megatron_burst.schedule import rings
from megatron_burst.schedule.demand import visibility_of

from .setting import Setting

TRIED = ("multicast", "all_gather", "prefetch")
HEAD_CHUNKS = (1, 2, 4)


class Passes(NamedTuple):
    """The fastest forward and backward, their algorithms, and the imbalance of pairs."""

    forward: PassTime
    backward: PassTime
    algorithms: tuple[str, str]
    balance: float

    @property
    def seconds(self) -> float:
        """Return seconds of both passes."""
        return self.forward.seconds + self.backward.seconds


def passes(
    setting: Setting,
    layout: Layout,
    lengths: np.ndarray,
    tried: Sequence[str] = TRIED,
    head_chunks: Sequence[int] = HEAD_CHUNKS,
) -> Passes:
    """Return attention over these documents in this layout."""
    size, sizes = layout.cp_size, setting.sizes
    grid, total = setting.grid(size), int(lengths.sum())
    mask = Documents(np.concatenate([[0], np.cumsum(lengths)])) & Causal()
    shards = [layout.spans(rank, total) for rank in range(size)]
    visibility, pairs = visibility_of(mask, shards, shards), pairs_seen(mask, shards)
    timed_passes: tuple[list[tuple[PassTime, str]], list[tuple[PassTime, str]]] = ([], [])
    for name in tried:
        forward_ring = rings.forward(name, grid, visibility=visibility, row_bytes=sizes.forward)
        backward_ring = rings.backward(
            name, grid, "kv", visibility=visibility, row_bytes=sizes.backward
        )
        for timed, schedule, per in zip(
            timed_passes, (forward_ring, backward_ring), setting.per_pair, strict=True
        ):
            for chunks in head_chunks:
                timing = pass_time(schedule, sizes, pairs * per, setting.rates, chunks)
                timed.append((timing, name if chunks == 1 else f"{name} x {chunks}"))
    (forward, first), (backward, second) = (
        min(timed, key=lambda x: x[0].seconds) for timed in timed_passes
    )
    work = pairs.sum(axis=1)
    return Passes(forward, backward, (first, second), float(work.max() / work.mean()))

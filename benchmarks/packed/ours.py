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
    want, pairs = visibility_of(mask, shards, shards), pairs_seen(mask, shards)
    found: tuple[list[tuple[PassTime, str]], list[tuple[PassTime, str]]] = ([], [])
    for name in tried:
        there = rings.forward(name, grid, visibility=want, row_bytes=sizes.forward)
        back = rings.backward(name, grid, "kv", visibility=want, row_bytes=sizes.backward)
        for into, schedule, per in zip(found, (there, back), setting.per_pair, strict=True):
            for chunks in head_chunks:
                took = pass_time(schedule, sizes, pairs * per, setting.rates, chunks)
                into.append((took, name if chunks == 1 else f"{name} x {chunks}"))
    (forward, first), (backward, second) = (min(each, key=lambda x: x[0].seconds) for each in found)
    work = pairs.sum(axis=1)
    return Passes(forward, backward, (first, second), float(work.max() / work.mean()))

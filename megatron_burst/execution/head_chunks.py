"""Head chunks: groups of heads of one rank whose rings run one behind the other.

While one head chunk computes, the hops of another are on the links; of the last hops, which no
compute of their own can hide, only those of the last head chunk are exposed. Owns which heads are
in a chunk and the order in which the rings advance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from ..schedule.head_shares import deferred_chunks
from .executor import Pass
from .passes import Backward, Forward


def split(run: Pass, count: int, heads: int, kv_heads: int) -> Iterator[tuple[Pass, slice, slice]]:
    """The pass of each head chunk, and its slices of the query heads and the key/value heads.

    The last head chunks defer the pair of their own chunks, which waits for no transfer, to
    overlap it with their last gradient transfers; the first ones compute while they start.
    """
    deferred = deferred_chunks(count)
    each, kv_each = heads // count, kv_heads // count
    for i in range(count):
        mine, keys = slice(i * each, (i + 1) * each), slice(i * kv_each, (i + 1) * kv_each)
        name = run.name if count == 1 else f"{run.name}, heads {mine.start} to {mine.stop - 1}"
        program = run.program if i < count - deferred else run.deferred
        yield replace(run, name=name, program=program), mine, keys


def run_staggered(rings: Sequence[Forward | Backward]) -> None:
    """Run all to their ends, each one boundary behind the one before."""
    waiting, running = list(rings), []
    while waiting or running:
        running += waiting[:1]
        del waiting[:1]
        for ring in list(running):
            if not ring.executor.advance(ring.compute):
                running.remove(ring)


def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The heads (dimension 2) of all chunks side by side."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=2)

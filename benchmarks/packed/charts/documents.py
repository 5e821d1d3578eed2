"""Documents of MagiAttention's benchmark, drawn by its rule from its published distribution."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from benchmarks.advise.published_tables import table

CUT = 4  # no document is longer than the pack / CUT
PACKS = 20


@cache
def magi_packs(pack: int, count: int = PACKS, seed: int = 42) -> tuple[np.ndarray, ...]:
    """Return int64 document lengths of the first `count` packs of `pack` tokens of the benchmark.

    The sampler of the benchmark gives a document the middle length of its bin. Documents longer
    than a quarter of the pack are cut into quarters and a remainder. All parts are shuffled and put
    into packs one after another; a part that does not fit continues in the next pack. Packs are
    shuffled.
    """
    rows = table("magi_document_lengths")
    middle = np.array([(int(row["first"]) + int(row["last"])) // 2 for row in rows])
    documents = np.array([int(row["documents"]) for row in rows])
    cap, remainder = pack // CUT, middle % (pack // CUT)
    whole = np.full((middle // cap * documents).sum(), cap)
    parts = np.concatenate([whole, np.repeat(remainder[remainder > 0], documents[remainder > 0])])
    random = np.random.default_rng(seed)
    parts = parts.astype(np.int32)
    random.shuffle(parts)
    ends = np.cumsum(parts, dtype=np.int64)
    order = list(range(int(ends[-1]) // pack))
    random.shuffle(order)
    packs = []
    for index in order[:count]:
        begin, end = index * pack, (index + 1) * pack
        inside = ends[np.searchsorted(ends, begin, "right") : np.searchsorted(ends, end, "left")]
        packs.append(np.diff(np.concatenate([[begin], inside, [end]])))
    return tuple(packs)


def area(lengths: Sequence[int] | np.ndarray, causal: bool) -> float:
    """Return the visible pairs of these documents."""
    sizes = np.asarray(lengths, dtype=float)
    return float((sizes * (sizes + 1) / 2 if causal else sizes * sizes).sum())

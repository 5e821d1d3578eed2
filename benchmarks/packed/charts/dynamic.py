"""Megatron-LM's example of dynamic context parallelism: micro-batches and calls, counted.

The model is so small that a step takes ten times as long as its compute. Time depends on the number
of micro-batches and calls, not on bytes. So a step is a + m * b + c * s for m micro-batches and c
consecutive attention calls per layer, summed over micro-batches. The three constants are fitted to
four of the ten published times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.advise.published_tables import table
from benchmarks.packed import megatron
from megatron_burst.autotune.pair_counts import pairs_seen
from megatron_burst.layout import make
from megatron_burst.masks import Causal, Documents

# Ranks of a group, maximum tokens of a rank, documents of a group in a step.
CP, TOKENS, DOCUMENTS = 4, 2048, 8
MEAN, SIGMA, LEAST, MOST = 1024, 1.5, 128, 8192
BATCHES = 40
FITTED_GPUS = (4, 64)
WAYS = ("dp_balanced", "dynamic_cp", "fours", "all")


class Count(NamedTuple):
    """Micro-batches of a step, and consecutive attention calls of a layer."""

    micro_batches: float
    calls: float


def lengths(gpus: int, seed: int) -> np.ndarray:
    """Return int64 document lengths of a step."""
    random = np.random.default_rng(seed)
    middle = np.log(MEAN) - SIGMA**2 / 2  # log of the median of a log-normal with this mean
    samples = random.lognormal(middle, SIGMA, DOCUMENTS * gpus // CP)
    return np.clip(samples, LEAST, MOST).astype(np.int64)


def counted(way: str, gpus: int, documents: np.ndarray) -> Count:
    """Count the micro-batches and calls of one step."""
    if way == "dp_balanced":  # all micro-batches on rings of four
        plan = megatron.fixed(documents.tolist(), gpus, CP, TOKENS)
        return Count(len(plan), len(plan) * CP)
    if way == "dynamic_cp":  # the largest group of a micro-batch ends last
        plan = megatron.dynamic(documents.tolist(), gpus, TOKENS)
        # A document is put into at most one group of context parallelism.
        return Count(len(plan), sum(min(CP, max(group.size for group in batch)) for batch in plan))
    groups, packs = (gpus // CP, 1) if way == "fours" else (1, 1)
    while (plan := _packs(documents, groups * packs, gpus // groups * TOKENS)) is None:
        packs += 1
    calls = [_calls(gpus // groups, pack) for pack in plan]
    return Count(packs, sum(max(calls[i * groups : (i + 1) * groups]) for i in range(packs)))


def _packs(documents: np.ndarray, count: int, room: int) -> list[list[int]] | None:
    """Distribute documents over `count` packs, longest first, each into the emptiest pack.

    Packs of similar work follow one another. None if a document does not fit.
    """
    packs: list[list[int]] = [[] for _ in range(count)]
    for length in np.sort(documents)[::-1].tolist():
        emptiest = min(packs, key=sum)
        if sum(emptiest) + length > room:
            return None
        emptiest.append(length)
    return sorted(packs, key=lambda pack: -max(pack, default=0))


def _calls(ranks: int, documents: Sequence[int]) -> int:
    """Return the largest number of ranks whose keys one rank uses, in layout balanced."""
    if not documents:
        return 0
    padding = -sum(documents) % ranks
    bounds = np.concatenate([[0], np.cumsum([*documents, *[padding] * (padding > 0)])])
    layout = make("balanced", cp_size=ranks, cu_seqlens=bounds, per_node=CP)
    shards = [layout.spans(rank, int(bounds[-1])) for rank in range(ranks)]
    return int((pairs_seen(Documents(bounds) & Causal(), shards) > 0).sum(axis=1).max())


def counts(gpus: Sequence[int], batches: int = BATCHES) -> dict[tuple[str, int], Count]:
    """Return means over batches, by method and number of GPUs."""
    return {
        (way, size): Count(*np.mean(
            [counted(way, size, lengths(size, seed)) for seed in range(batches)], axis=0
        ).tolist())
        for way in WAYS
        for size in gpus
    }  # fmt: skip


def published() -> dict[tuple[str, int], float]:
    """Return published milliseconds of a step."""
    return {
        (way, int(row["gpus"])): float(row[f"{way}_ms"])
        for row in table("megatron_dynamic_cp")
        for way in WAYS[:2]
    }


def constants(counts: dict[tuple[str, int], Count]) -> np.ndarray:
    """Return milliseconds [3] of a step, of a micro-batch, and of a call in all layers.

    They are fitted to the published times at `FITTED_GPUS` by non-negative least squares.
    """
    published_ms = {key: ms for key, ms in published().items() if key[1] in FITTED_GPUS}
    rows = np.array([[1.0, *counts[key]] for key in published_ms])
    times = np.array(list(published_ms.values()))
    best, best_error = np.zeros(3), np.inf
    for subset in range(1, 8):  # the best fit of all subsets in which no constant is below 0
        indices = [i for i in range(3) if subset >> i & 1]
        solution = np.linalg.lstsq(rows[:, indices], times, rcond=None)[0]
        full = np.zeros(3)
        full[indices] = solution
        error = float(((rows @ full - times) ** 2).sum())
        if (solution >= 0).all() and error < best_error - 1e-9:
            best, best_error = full, error
    return best

"""Balance of micro-batches: `--burst-pack documents` against Megatron's default scheduler.

`python -m benchmarks.packing` draws batches of documents and packs each in two ways: like
`DpBalancedScheduler` of Megatron-Core, in document order until a micro-batch is full, splitting the
last micro-batches until data-parallel ranks have equal numbers; and by `megatron_burst.packing`.
Work is counted for Llama 3 8B (32 layers) without the LM head. Padding counts, and only ours pads.
The script counts work and runs no model.

Imbalance: work of the busiest micro-batch / mean. Step: work of the busiest rank / equal share of
the work of the documents without padding.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.packed.megatron import fixed
from benchmarks.report import markdown
from megatron_burst.packing import Work, pack

RANKS, MICRO_BATCHES, CAPACITY, FILL = 8, 4, 2**20, 0.9
_WIDTH, _GROUPS, _MLP, _HEADS, _D, _LAYERS = 4096, 8, 14336, 32, 128, 32
LLAMA = Work.of(
    token_flops=2 * _LAYERS * _WIDTH * (2 * _D * (_HEADS + _GROUPS) + 3 * _MLP),
    pair_flops=4 * _D * _HEADS,
    windows=[(None, 0)] * _LAYERS,
)
# Median, sigma of the logarithm, longest.
KINDS = {
    "median 1K, cap 32K": (1024, 1.0, 2**15),
    "median 2K, long tail to 512K": (2048, 1.8, 2**19),
    "median 8K, tail to 1M": (8192, 1.5, 2**20),
    "64K each": (2**16, 0.0, 2**16),
}


def lengths_of(kind: str, seed: int) -> np.ndarray:
    """Return document lengths of one global batch."""
    median, sigma, longest = KINDS[kind]
    draw, wanted = np.random.default_rng(seed), RANKS * MICRO_BATCHES * CAPACITY * FILL
    count = int(2 * wanted / median)
    drawn = np.exp(np.log(median) + sigma * draw.standard_normal(count)).round().astype(np.int64)
    drawn = np.clip(drawn, 16, longest)
    return drawn[: int(np.searchsorted(drawn.cumsum(), wanted))]


def shares(loads: np.ndarray, ideal: float) -> tuple[float, float]:
    """Return imbalance and step of loads [ranks, micro-batches]."""
    return float(loads.max() / loads.mean()), float(loads.sum(axis=1).max() * RANKS / ideal)


def work(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the work of each document."""
    return LLAMA.attention(np.asarray(lengths)) + LLAMA.token * np.asarray(lengths)


def compared(kind: str, seed: int) -> Iterator[tuple[float, float]]:
    """Yield imbalance and step of one batch: Megatron's, then ours."""
    lengths = lengths_of(kind, seed)
    own = work(lengths)
    rounds = fixed(lengths.tolist(), RANKS, 1, CAPACITY)
    theirs = np.array([[work(group.lengths).sum() for group in groups] for groups in rounds])
    yield shares(theirs.T, own.sum())
    yield shares(pack(lengths, LLAMA, ranks=RANKS, capacity=CAPACITY).loads, own.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=100)
    batches = parser.parse_args().batches
    rows = []
    for kind in KINDS:
        batch_shares = np.array([[*compared(kind, seed)] for seed in range(batches)])
        mean, worst = batch_shares.mean(axis=0), batch_shares.max(axis=0)
        rows.append(
            [kind, *(f"{mean[i, j]:.3f} ({worst[i, j]:.3f})" for j in (0, 1) for i in (0, 1))]
        )
    ways = [f"{what}, {how}" for what in ("imbalance", "step") for how in ("in order", "packed")]
    print(markdown(["documents", *ways], rows))


if __name__ == "__main__":
    main()

"""Hybrid context parallelism: the group that holds a micro-batch changes between micro-batches."""

import micro_batches
import pytest
from test_parity import TOLERANCE, worst

BOOKS = {
    0: [(0,), (0, 1)],
    1: [(0, 1), (1,), (1, 2)],
    2: [(1, 2), (2,), (2, 3)],
    3: [(2, 3), (3,)],
}


@pytest.mark.parametrize(
    ("options", "window"),
    [
        ({}, None),
        ({"intra_size": 2, "side": "query"}, None),
        ({"algorithm": "ring", "side": "kv"}, 6),
        ({"algorithm": "ulysses", "kernel": "reference"}, None),
    ],
)
def test_every_micro_batch_has_its_own_group(four, options, window):
    """One group of 4, two of 2, an uneven pair and single ranks take turns.

    Forward and backward equal a dense mask on one rank. Ranks make different numbers of calls, and
    wait only for members of their groups. Groups of the same ranks are made once.
    """
    results = four(micro_batches.alternating, options, window)
    for rank, (error, books, made, alive) in enumerate(results):
        assert error < 1e-10
        assert books == BOOKS[rank]
        assert made == 0
        assert not any(alive)


RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
HYBRID = {"hybrid_context_parallel": True, "max_seqlen_per_dp_cp_rank": 8}


@pytest.fixture(scope="module")
def alone(four, common):
    """Return every document alone on one rank, with Megatron's own attention."""
    histories = four(micro_batches.losses, common, 1, {})
    assert all(one == histories[0] for one in histories)
    return histories[0][0]


@pytest.mark.parametrize(
    ("size", "flags"),
    [
        (4, ""),
        (2, f"--burst-layout striped --burst-intra-size 2 {RECOMPUTE}"),
        pytest.param(1, "", marks=pytest.mark.slow),
    ],
)
def test_megatrons_hybrid_schedule_trains_like_one_rank(four, common, alone, size, flags):
    """Megatron's data wrapper and schedule, with documents of 8 to 32 tokens on 1, 2 or 4 ranks."""
    results = four(micro_batches.losses, [*common, *flags.split()], size, HYBRID)
    for history, books in results:
        assert worst(history, alone) < TOLERANCE
        assert {len(ranks) for ranks in books} | {size} == {1, 2, 4}

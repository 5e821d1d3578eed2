"""The memory of a schedule on one rank, by hand on small rings."""

import pytest
import torch

import megatron_burst as mb
from megatron_burst.schedule.demand import RowBytes, everything
from megatron_burst.schedule.program import held_bytes
from megatron_burst.schedule.rings import backward, forward
from megatron_burst.schedule.tables import Grid

ROWS = 2
THERE = RowBytes(kv=10, query=3, dkv=0, dquery=0, out=5)
BACK = RowBytes(kv=10, query=8, dkv=7, dquery=4, out=0)


def held(schedule, rank=0):
    return held_bytes(schedule.tables, schedule.program(rank), rank, schedule.row_bytes)


@pytest.mark.parametrize(("ranks", "chunks"), [(1, 0), (2, 1), (3, 2), (4, 2), (8, 2)])
def test_a_ring_holds_what_it_computes_with_and_what_arrives(ranks, chunks):
    wanted = everything(ranks, ROWS)
    assert held(forward("ring", Grid(1, ranks), wanted=wanted, row_bytes=THERE)) == chunks * 20


def test_a_backward_of_two_ranks():
    wanted = everything(2, ROWS)
    schedule = backward("ring", Grid(1, 2), "kv", wanted=wanted, row_bytes=BACK)
    # Step 1: the keys of the other rank (20) and their gradient (14). Then the gradient leaves
    # while that of the own keys arrives: 28.
    assert held(schedule) == 20 + 14


def test_all_gather_holds_everything_and_a_chunk_that_was_kept_is_not_counted():
    wanted, grid = everything(4, ROWS), Grid(1, 4)
    assert held(forward("all_gather", grid, wanted=wanted, row_bytes=THERE)) == 3 * 20
    for kept, chunks in ((0, 3), (2, 1), (3, 0)):
        schedule = backward(
            "all_gather", grid, "kv", wanted=wanted, row_bytes=BACK._replace(dkv=0), kept=kept
        )
        assert held(schedule) == chunks * 20, kept


def test_a_tile_holds_partial_outputs_and_the_plan_says_how_much():
    wanted = everything(4, ROWS)
    schedule = forward("tile", Grid(2, 2), wanted=wanted, row_bytes=THERE)
    # The other rank's keys (20) and queries (6), and their partial output (10).
    assert held(schedule) == 20 + 6 + 10
    q = [torch.zeros(4, 1, 2, 4) for _ in range(4)]
    plan = mb.prepare(q, q, q, groups=mb.Groups.in_process(inter=2, intra=2), algorithm="tile")
    assert plan.held_bytes > 0
    assert "received chunks at most" in plan.describe()

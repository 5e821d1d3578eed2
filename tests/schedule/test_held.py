"""The memory of a schedule on one rank, by hand on small rings."""

from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest
import torch

import megatron_burst as mb
from megatron_burst.comm import packing
from megatron_burst.execution.buffers import Buffers, MessageKind
from megatron_burst.plugins.testing import in_process
from megatron_burst.schedule.demand import Demand, RowBytes, all_visible, visibility_of
from megatron_burst.schedule.dry_run import _ReplayBuffers, dry_run, held_bytes
from megatron_burst.schedule.rings import backward, forward
from megatron_burst.schedule.tables import Grid

ROWS = 2
THERE = RowBytes(kv=10, query=3, dkv=0, dquery=0, out=5)
BACK = RowBytes(kv=10, query=8, dkv=7, dquery=4, out=0)


def held(schedule, rank=0):
    return held_bytes(schedule, rank)


@pytest.mark.parametrize(("ranks", "chunks"), [(1, 0), (2, 1), (3, 2), (4, 2), (8, 2)])
def test_a_ring_holds_what_it_computes_with_and_what_arrives(ranks, chunks):
    visibility = all_visible(ranks, ROWS)
    assert (
        held(forward("ring", Grid(1, ranks), visibility=visibility, row_bytes=THERE)) == chunks * 20
    )


def test_a_backward_of_two_ranks():
    visibility = all_visible(2, ROWS)
    schedule = backward("ring", Grid(1, 2), "kv", visibility=visibility, row_bytes=BACK)
    # Step 1: the keys of the other rank (20) and their gradient (14). Then the gradient leaves
    # while that of the own keys arrives: 28.
    assert held(schedule) == 20 + 14
    # Buffers stay until the pass ends, one of them for the own gradient.
    (moment,) = dry_run(schedule, 0).moments
    assert moment == {"kv": (2,), "dkv": (2, 2, 2), "dquery": (2,)}


def test_all_gather_holds_everything():
    visibility, grid = all_visible(4, ROWS), Grid(1, 4)
    assert held(forward("all_gather", grid, visibility=visibility, row_bytes=THERE)) == 3 * 20
    back = backward("all_gather", grid, "kv", visibility=visibility, row_bytes=BACK._replace(dkv=0))
    assert held(back) == 3 * 20


def test_a_tile_holds_partial_outputs_and_the_plan_says_how_much():
    visibility = all_visible(4, ROWS)
    schedule = forward("tile", Grid(2, 2), visibility=visibility, row_bytes=THERE)
    # The other rank's keys (20) and queries (6), and their partial output (10).
    assert held(schedule) == 20 + 6 + 10
    q = [torch.zeros(4, 1, 2, 4) for _ in range(4)]
    plan = in_process.prepare(q, q, q, groups=in_process.groups(inter=2, intra=2), algorithm="tile")
    assert plan.held_bytes > 0
    assert "received chunks at most" in plan.describe()


# --- hops that are posted many steps ahead ------------------------------------------------------

EACH = RowBytes(kv=1, query=0, dkv=0, dquery=0, out=0), RowBytes(1, 0, 1, 0, 0)


def most_held(algorithm, grid, visibility, passes=EACH):
    """Of each pass, the rows that the fullest rank holds."""
    route = "direct" if algorithm == "burst" else "ring"
    there, back = passes
    made = (forward(algorithm, grid, visibility=visibility, row_bytes=there, route=route),
            backward(algorithm, grid, "kv", visibility=visibility, row_bytes=back,
                     route=route))  # fmt: skip
    return [max(held(each, rank) for rank in range(grid.size)) for each in made]


def packs(grid, rows, count=6):
    """What ranks want of random documents, in two layouts."""
    random, total = np.random.default_rng(0), grid.size * rows
    for median in random.choice([rows // 3, rows, 3 * rows], count):
        ends = np.cumsum(np.maximum(2, random.lognormal(np.log(median), 1.3, 9 * total // median)))
        bounds = [0, *np.unique(ends[ends < total].astype(int)).tolist(), total]
        for name, more in (("zigzag", {}), ("balanced", {"cu_seqlens": bounds})):
            layout = mb.layout.make(name, cp_size=grid.size, **more)
            shards = [layout.spans(rank, total) for rank in range(grid.size)]
            yield visibility_of(mb.masks.Documents(bounds) & mb.masks.Causal(), shards, shards)


@pytest.mark.parametrize("algorithm", ["burst", "multicast"])
@pytest.mark.parametrize("grid", [Grid(1, 4), Grid(1, 8), Grid(8, 1), Grid(2, 4), Grid(4, 4)])
def test_rows_sent_long_before_their_use_take_the_room_of_whole_chunks(
    algorithm, grid, monkeypatch
):
    """At most a tenth more than where all see everything, or than what hops that are a step or two
    ahead take of the same documents; and half of these are sent further ahead."""
    rows, real, actual = 64, Demand.ahead, Counter()

    def ahead(self, *given):
        actual[real(self, *given) > given[-1]] += 1
        return real(self, *given)

    most = most_held(algorithm, grid, all_visible(grid.size, rows))
    for asked in packs(grid, rows):
        monkeypatch.setattr(Demand, "ahead", ahead)
        early = most_held(algorithm, grid, asked)
        monkeypatch.setattr(Demand, "ahead", lambda self, *given: given[-1])
        late = most_held(algorithm, grid, asked)
        for mine, dense, before in zip(early, most, late, strict=True):
            assert mine <= 1.1 * max(dense, before)
    assert actual[True] >= actual.total() / 4


class Unlimited(NamedTuple):
    """An endpoint whose messages may be as short as they are."""

    room: int = 0

    def released(self, tensors):
        pass


def test_buffers_are_reused_as_the_executor_does():
    """The same random messages through both: each new buffer is one of the same rows."""
    random = np.random.default_rng(0)
    row = torch.Size((4,)), torch.float32
    real = Buffers(torch.device("cpu"), Unlimited(), {"kv": MessageKind([row], 64)})
    counted = _ReplayBuffers(64, short=True)
    empty = packing.layout_of([(torch.Size((0, 4)), torch.float32)])
    used, buffers = [], {}
    for _ in range(300):
        if used and random.random() < 0.45:
            message, rows = used.pop(random.integers(len(used)))
            real.give("kv", message)
            counted.give(rows)
            continue
        rows = int(random.choice([0, 1, 3, 4, 5, 15, 16, 17, 40, 64]))
        message = real.take("kv", rows)
        used.append((message, counted.take(rows)))
        buffers[id(message.room)] = message.room
    smallest = packing.room_size(empty, real.device)
    made = sorted((room.numel() - smallest) // 16 for room in buffers.values())
    assert made == sorted(counted.rows.elements())
    assert {*made} == {1, 4, 16, 64}


def test_how_far_ahead_by_hand():
    """Two chunks of 8 rows may come at once; rank 0 gets 8 rows at each of steps 1, 2 and 3, rank 1
    gets 3, or 8, at each of steps 1 to 5."""
    grid = Grid(1, 8)
    sides = all_visible(grid.size, 8)
    sides.keys.users[0, 1] = False  # so that not all want all
    of = Demand(grid, "kv", sides)

    def ahead(*gets, least=1):
        rank, step, rows = (np.array(column) for column in zip(*gets, strict=True))
        return of.ahead((rank, step, 2 + np.arange(len(rank)), rows), 2, least)

    assert ahead((0, 1, 8), (0, 2, 8), (0, 3, 8)) == 1  # three chunks in three steps
    assert ahead(*((1, step, 3) for step in range(1, 6))) == 8  # 15 rows in all of the six
    assert ahead(*((1, step, 4) for step in range(1, 6))) == 2  # 12 rows in three, in five 20
    assert ahead((0, 1, 16), (0, 7, 1), least=2) == 4  # 17 rows in eight, of five none has more
    assert Demand(grid, "kv", all_visible(8, 8)).ahead(
        [np.array([x]) for x in (0, 7, 1, 1)], 2, 1
    ) == 1  # fmt: skip


def test_gradients_that_return_to_one_rank_count_there():
    """Each of ranks 1 to 7 gets 8 rows of rank 0 at a step of its own, and only rank 0 gets the
    gradients of all: three chunks in three steps, where two are permitted."""
    sides = all_visible(8, 8)
    sides.keys.users[0, 1] = False
    one, eight = np.arange(1, 8), np.full(7, 8)
    for row_bytes, steps in ((RowBytes(), 1), (RowBytes(dkv=0), 8)):
        of = Demand(Grid(1, 8), "kv", sides, row_bytes)
        assert of.ahead((one, one, np.zeros_like(one), eight), 2, 1) == steps

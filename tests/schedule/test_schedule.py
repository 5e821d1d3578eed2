"""Schedules as data: every algorithm's tables and programs, acted out by `tables_oracle`.

By hand where the mask is full: hop counts, buffers, what overlaps with what. By property over
random grids, masks, layouts and what a pass asks, for every name in the registry.
"""

from collections import Counter
from itertools import product

import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import GRIDS, SMALL, passes, sends, worlds
from tables_oracle import act_out, dense

from megatron_burst.layout import Span
from megatron_burst.masks import Causal
from megatron_burst.schedule.algorithms import ALGORITHMS
from megatron_burst.schedule.demand import BACKWARD, all_visible, visibility_of
from megatron_burst.schedule.rings import SIDES, backward, forward
from megatron_burst.schedule.tables import Grid, Pair, relay_chains

RINGS = ("burst", "double_ring", "ring")  # whose hops, buffers and overlap are known by hand
IDS = [f"{nodes}x{width}" for nodes, width in GRIDS]
STILL = BACKWARD._replace(dkv=0, dquery=0)  # nobody needs a gradient


def schedules(grid, names=RINGS):
    """Every pass there is over a grid: forward, and backward with each side."""
    for name in names:
        yield forward(name, grid)
        for side, row_bytes in product(SIDES, (BACKWARD, STILL)):
            yield backward(name, grid, side, row_bytes=row_bytes)


def programs(schedule, own_last=False):
    return [schedule.program(rank, own_last) for rank in range(schedule.grid.size)]


def play(schedule, own_last=False):
    """Act out the programs of a schedule in which all see everything, one row on each rank."""
    size = schedule.grid.size
    seen = np.ones((size, size), dtype=bool)
    return act_out(schedule, schedule.grid, seen, programs=programs(schedule, own_last))


# --- all see everything -----------------------------------------------------------------------


@pytest.mark.parametrize("grid", GRIDS, ids=IDS)
def test_every_pair_once_and_every_gradient_home_from_everyone(grid):
    for at, schedule in enumerate(schedules(grid, ALGORITHMS)):
        play(schedule, own_last=(at + grid.intra) % 2 == 0)


def rings_of(schedule):
    """On how many nodes of how many ranks each its chunks move."""
    return Grid(1, schedule.grid.size) if schedule.algorithm == "ring" else schedule.grid


def most_travelling(schedule):
    """The true maximum of travelling chunks, at most 4 on any grid: within a node one to compute
    with and one arriving; across nodes the one to be passed on, which waits until its transfer
    has landed, and the one arriving for the next cycle."""
    nodes, width = rings_of(schedule)
    return min(2, width - 1) + min(2, nodes - 1)


def most_gradients(schedule):
    """The true maximum of gradient buffers, the own sum included, at most 6: the own sum, one
    leaving and one arriving; two levels add the node's sum, and where there is a node in
    between and nothing blocks, what leaves and arrives over the long link meanwhile."""
    nodes, width = rings_of(schedule)
    if not schedule.gradients:
        return 0
    if nodes == 1 or width == 1:
        return 3 if nodes * width > 1 else 1
    return 6 if nodes > 2 and schedule.algorithm == "burst" else 4


@pytest.mark.parametrize("grid", GRIDS, ids=IDS)
def test_few_buffers_whatever_the_size_of_the_grid(grid):
    for schedule in schedules(grid):
        played = play(schedule)
        assert played.most_held == most_travelling(schedule), schedule
        assert played.most_partial["d" + schedule.side] == most_gradients(schedule), schedule


@pytest.mark.parametrize("grid", GRIDS, ids=IDS)
def test_hop_counts_are_the_published_table(grid):
    """Flat G - 1; two levels M (L - 1) within the node and M - 1 between; gradients alike."""
    for schedule in schedules(grid):
        for rank in range(grid.size):
            counts = oracle.hops(schedule.algorithm, *grid, rank)
            for gradient in {False, schedule.gradients}:
                hops = [h for h in sends(schedule, rank) if h.chunk.accumulated == gradient]
                got = Counter(hop.link for hop in hops)
                assert {"intra": got["intra"], "inter": got["inter"]} == counts


@pytest.mark.parametrize(("algorithm", "side"), list(product(RINGS, SIDES)))
@pytest.mark.parametrize("grid", [Grid(1, 4), Grid(4, 1), Grid(2, 4), Grid(4, 2), Grid(3, 3)])
def test_what_overlaps_with_what(grid, algorithm, side):
    """Activations and delayed gradients travel during one step, between nodes during a cycle;
    double_ring's gradients block."""
    for rank in range(grid.size):
        for hop in sends(backward(algorithm, grid, side), rank):
            steps = 1
            if algorithm != "ring" and hop.ring == "inter":
                steps = grid.intra
            if algorithm == "double_ring" and hop.chunk.accumulated:
                steps = 0
            assert hop.land - hop.post == steps, hop


@pytest.mark.parametrize("algorithm", ["burst", "double_ring"])
@pytest.mark.parametrize("grid", [Grid(1, 5), Grid(5, 1)])
def test_one_node_or_one_rank_per_node_is_the_flat_ring(grid, algorithm):
    one, other = forward(algorithm, grid), forward("ring", grid)
    for rank in range(5):
        got = [hop._replace(ring="") for hop in sends(one, rank)]
        assert got == [hop._replace(ring="") for hop in sends(other, rank)]
        assert {hop.link for hop in got} == {"intra" if grid.inter == 1 else "inter"}


def owners(program, side="key"):
    """Of every boundary the owners of the travelling chunks that are computed with."""
    return [[getattr(pair, side) for pair in boundary.pairs] for boundary in program]


def test_a_ring_of_four_by_hand():
    """Rank 1 computes with its own keys, then with those of ranks 0, 3 and 2."""
    program = forward("ring", Grid(1, 4)).program(1)
    assert owners(program) == [[1], [0], [3], [2], []]
    assert [b.pairs for b in program][:2] == [(Pair(1, 1),), (Pair(1, 0, key_rows=1),)]


def test_two_by_two_by_hand():
    """Rank 3 (node 1, index 1) finishes its own node before the other node's chunks come."""
    got = owners(backward("burst", Grid(2, 2), "query").program(3), "query")
    assert got[:4] == [[3], [2], [1], [0]]
    assert not any(got[4:])


@pytest.mark.parametrize("grid", [Grid(1, 4), Grid(2, 2), Grid(4, 2)])
def test_rings_carry_only_their_own_members(grid):
    for algorithm in RINGS:
        for rank in range(grid.size):
            for hop in sends(backward(algorithm, grid, "kv"), rank):
                same_node = hop.src // grid.intra == hop.dst // grid.intra
                same_index = hop.src % grid.intra == hop.dst % grid.intra
                assert hop.link == ("intra" if same_node else "inter")
                assert {"flat": True, "intra": same_node, "inter": same_index}[hop.ring]
                assert (hop.ring == "flat") == (algorithm == "ring")


def test_the_own_pair_may_come_last():
    """Rank 1 of a ring of four computes its own pair while the last gradient travels (posted at
    4); rank 1 of 2 x 2 while the other node's share does (posted at 5, after the node's sum)."""
    got = owners(backward("ring", Grid(1, 4), "query").program(1, own_last=True), "query")
    assert got == [[], [0], [3], [2], [1], []]
    got = owners(backward("burst", Grid(2, 2), "query").program(1, own_last=True), "query")
    assert got == [[], [0], [3], [2], [], [1], [], []]
    still = forward("ring", Grid(1, 4)).program(1, own_last=True)
    assert owners(still)[0] == [1], "no gradient travels: nothing to hide"


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"algorithm must be one of .*double_ring.*got 'rings'"):
        forward("rings", Grid(1, 2))
    with pytest.raises(ValueError, match=r"algorithm must be one of .*burst.*got ''"):
        backward("", Grid(1, 2), "kv")
    with pytest.raises(ValueError, match="side must be one of kv, query or auto, got 'q'"):
        backward("ring", Grid(1, 2), "q")


# --- any mask ---------------------------------------------------------------------------------


def schedule_of(algorithm, world, pass_case, streams=False):
    """The schedule of a pass over a world."""
    wants = visibility_of(world.mask, world.shards, world.shards, streams=streams)
    more = {"visibility": wants.whole() if pass_case.whole else wants}
    more |= {"row_bytes": pass_case.row_bytes, "route": pass_case.route}
    if not pass_case.side:
        return forward(algorithm, world.grid, **more)
    return backward(algorithm, world.grid, pass_case.side, **more)


def check(algorithm, world, data):
    """Tables and both programs of one random pass."""
    asked = data.draw(passes(world))
    streams = ALGORITHMS[algorithm].relays and data.draw(st.booleans(), label="streams")
    schedule = schedule_of(algorithm, world, asked, streams)
    if schedule.chains:
        check_chains(schedule)
    seen = dense(world.mask, world.shards)
    act_out(schedule, world.grid, seen)
    last = data.draw(st.booleans(), label="own_last")
    act_out(schedule, world.grid, seen, programs=programs(schedule, own_last=last))


def check_chains(schedule):
    """Chains of the relay stream start after the pairs whose results they send, and owners start no
    copy later than the chain."""
    moved, pairs = schedule.tables.transfers, schedule.tables.pairs
    chains = list(relay_chains(moved))
    copies, sums = moved.where(~moved.accumulated), moved.where(moved.accumulated)
    assert len(chains) == bool(len(copies.src)) + bool(len(sums.src))
    assert list(chains) == sorted(chains)
    if len(copies.src):
        assert set(copies.post[copies.src == copies.owner].tolist()) == {chains[0]}
        assert chains[0] == 0
    if len(sums.src):
        assert pairs.step[(pairs.query != pairs.rank) | (pairs.key != pairs.rank)].max() < chains[1]
        own = pairs.step[(pairs.query == pairs.rank) & (pairs.key == pairs.rank)]
        assert set(own.tolist()) <= {chains[1]}
        assert copies.land.max() <= chains[1]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@settings(max_examples=25)
@given(worlds(), st.data())
def test_rows_are_there_and_results_come_home(algorithm, world, data):
    check(algorithm, world, data)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@settings(max_examples=200)
@given(worlds([*GRIDS, Grid(5, 3), Grid(3, 5), Grid(2, 8), Grid(8, 2)]), st.data())
def test_rows_are_there_and_results_come_home_at_length(algorithm, world, data):
    check(algorithm, world, data)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@settings(max_examples=15)
@given(worlds(SMALL[1:]), st.data())
def test_channels_are_what_hops_travel_on(algorithm, world, data):
    """A plan makes a communicator for each; one that is missing would be missed in mid-call."""
    schedule = schedule_of(algorithm, world, data.draw(passes(world)))
    full = schedule_of(algorithm, world, data.draw(passes(world)))
    full = type(full)(full.grid, full.side, all_visible(world.grid.size), full.row_bytes,
                      algorithm=full.algorithm, route=full.route)  # fmt: skip
    for each, all_see in ((schedule, False), (full, True)):
        hops = [hop for rank in range(world.grid.size) for hop in sends(each, rank)]
        used = {(hop.ring, hop.chunk.accumulated) for hop in hops}
        channels, _ = each.travels({})
        assert len(channels) == len(set(channels))
        # A tile's shape, and so its rings, follows the bytes of the families.
        exact = all_see and algorithm != "tile"
        assert used == set(channels) if exact else used <= set(channels)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@settings(max_examples=15)
@given(worlds(), st.data())
def test_a_message_has_rows_and_never_the_same_twice(algorithm, world, data):
    """Whole chunks are what rows are part of: their bytes are never fewer."""
    asked = data.draw(passes(world))._replace(whole=False)
    few, whole = (schedule_of(algorithm, world, asked._replace(whole=w)) for w in (False, True))
    assert _bytes(few) <= _bytes(whole)


def _bytes(schedule):
    tables, total = schedule.tables, 0
    for family, name in enumerate(("kv", "query", "dkv", "dquery", "out")):
        moved = tables.transfers.where(tables.transfers.family == family)
        rows = tables.bundles(name).rows_of(moved.owner, moved.rows)
        assert (rows > 0).all()
        total += int(rows.sum()) * getattr(schedule.row_bytes, name)
    return total


# --- by hand: few readers, direct sends, all_gather ------------------------------


def causal(size, rows):
    """What ranks want where each holds so many rows in order: of the ranks before, everything."""
    shards = [[Span(rank * rows, 1, rows)] for rank in range(size)]
    return visibility_of(Causal(), shards, shards)


def test_nothing_is_sent_that_nobody_needs():
    """Contiguous causal on four ranks: rank 3 keeps its keys, rank 0 sends its own all the way."""
    schedule = forward("ring", Grid(1, 4), visibility=causal(4, 2))
    sent = [[hop.chunk.owner for hop in sends(schedule, rank)] for rank in range(4)]
    assert sent == [[0], [1, 0], [2, 1, 0], []]


@pytest.mark.parametrize(
    ("algorithm", "grid"), [("ring", Grid(1, 4)), ("burst", Grid(1, 4)), ("burst", Grid(4, 1))]
)
def test_the_ring_turns_the_way_that_sends_fewer_bytes(algorithm, grid):
    """Causal zigzag on four ranks of two rows. The late key 7 - r of rank r is seen by the ranks
    below r only: r hops downwards, 3 upwards. The early key r is seen by all, 3 hops either way."""
    shards = [[Span(rank, 1, 1), Span(7 - rank, 1, 1)] for rank in range(4)]
    schedule = forward(algorithm, grid, visibility=visibility_of(Causal(), shards, shards))
    moved = schedule.tables.transfers
    rows = schedule.tables.keys.rows_of(moved.owner, moved.rows)
    assert set(((moved.src - moved.dst) % 4).tolist()) == {1}
    assert int(rows.sum()) == 4 * 3 + (0 + 1 + 2 + 3)


def test_direct_sends_hold_two_chunks_and_all_gather_holds_all():
    assert play(forward("ring", Grid(1, 6), route="direct")).most_held == 2
    assert play(forward("all_gather", Grid(1, 6))).most_held == 5


def test_all_gather_awaits_gradients_at_the_end():
    moved = backward("all_gather", Grid(1, 4), "kv").tables.transfers
    sums = moved.where(moved.accumulated)
    assert set(sums.post.tolist()) == {2, 3, 4}
    assert set(sums.land.tolist()) == {5}

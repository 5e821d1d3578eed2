"""Schedules as data: `Play` acts out all ranks' programs with chunks as names, and objects.

What is played: every pair is computed exactly once, every hop leaves a rank that holds the
chunk, nothing is given up while somebody needs it, and every gradient comes home having
collected from everyone.
"""

from collections import Counter, defaultdict
from itertools import product

import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_burst.schedule.rings import SIDES, backward, forward
from megatron_burst.schedule.tables import Chunk, Grid, Pair

ALGORITHMS = ("burst", "double_ring", "ring")

GRIDS = [Grid(*g) for g in product(range(1, 5), range(1, 5))] + [Grid(1, 8), Grid(8, 1), Grid(2, 8)]
GRID_IDS = [f"{nodes}x{width}" for nodes, width in GRIDS]


def schedules(grid):
    """Every pass there is over a grid: forward, and backward with each side."""
    for algorithm in ALGORITHMS:
        yield forward(algorithm, grid)
        for side, gradients in product(SIDES, (True, False)):
            yield backward(algorithm, grid, side, gradients=gradients)


class Play:
    """All ranks of one schedule, boundary by boundary; any broken rule is an assertion."""

    def __init__(self, schedule, own_last=False):
        size = schedule.grid.size
        self.schedule = schedule
        self.programs = [schedule.program(rank, own_last) for rank in range(size)]
        own = [Chunk(schedule.side, rank) for rank in range(size)]
        self.held = [{own[rank], *schedule.kept_chunks(rank)} for rank in range(size)]
        self.sums = [defaultdict(set) for _ in range(size)]  # gradient -> ranks that added to it
        self.flying = []  # (hop, ranks that added to it)
        self.pairs = Counter()
        self.travelling = 0  # most chunks of others that a rank holds or is receiving
        self.gradients = 0  # most gradient buffers: sums, and what leaves and arrives
        for index in range(max(map(len, self.programs))):
            self.play(index)
        assert not self.flying

    def play(self, index):
        boundaries = {r: p[index] for r, p in enumerate(self.programs) if index < len(p)}
        assert all(boundary.index == index for boundary in boundaries.values())
        self.land(index)
        for rank, boundary in boundaries.items():
            self.release(rank, boundary.release)
        self.post(index, boundaries)
        self.measure()
        self.land(index)  # a hop that lands where it is posted blocks
        for rank, boundary in boundaries.items():
            if boundary.pair:
                self.compute(rank, boundary.pair)

    def land(self, index):
        landing = [flight for flight in self.flying if flight[0].land == index]
        self.flying = [flight for flight in self.flying if flight[0].land != index]
        for hop, added in landing:
            if hop.chunk.gradient:
                assert not self.sums[hop.dst][hop.chunk] & added, "somebody is counted twice"
                self.sums[hop.dst][hop.chunk] |= added
            else:
                assert hop.chunk not in self.held[hop.dst], "came twice"
                self.held[hop.dst].add(hop.chunk)

    def release(self, rank, chunks):
        for chunk in chunks:
            self.held[rank].remove(chunk)
            leaving = [h for h, _ in self.flying if h.src == rank and h.chunk == chunk]
            assert not leaving, "given up while in flight"

    def post(self, index, boundaries):
        posts = [(rank, hop) for rank, b in boundaries.items() for hop in b.posts]
        ends = Counter(hop for _, hop in posts)
        for hop, count in ends.items():
            assert count == 2, f"{hop} is in one program only"
            assert hop.post == index <= hop.land
            assert hop.src != hop.dst
        for rank, hop in posts:
            assert rank in (hop.src, hop.dst)
            if rank != hop.src:
                continue
            if hop.chunk.gradient:
                added = self.sums[rank].pop(hop.chunk)
                assert added, "nobody added to it"
                wanted = self.schedule.visible[self.pair(rank, hop.chunk.owner)]
                assert rank in added or not wanted, "left before this rank added to it"
                self.flying.append((hop, added))
            else:
                assert hop.chunk in self.held[rank], "sent without having it"
                self.flying.append((hop, None))

    def pair(self, rank, owner):
        """What `rank` computes with the travelling chunk of `owner`."""
        return Pair(rank, owner) if self.schedule.side == "kv" else Pair(owner, rank)

    def compute(self, rank, pair):
        family = self.schedule.side
        owner = pair.key if family == "kv" else pair.query
        assert pair == self.pair(rank, owner)
        assert self.schedule.visible[pair]
        assert Chunk(family, owner) in self.held[rank], "computed without having it"
        self.pairs[pair] += 1
        if self.schedule.gradients:
            self.sums[rank][Chunk("d" + family, owner)].add(rank)

    def measure(self):
        for rank, held in enumerate(self.held):
            flights = [hop for hop, _ in self.flying]
            others = [c for c in held if c.owner != rank]
            others += [h for h in flights if h.dst == rank and not h.chunk.gradient]
            self.travelling = max(self.travelling, len(others))
            sums = [c for c, added in self.sums[rank].items() if added]
            sums += [h for h in flights if rank in (h.src, h.dst) and h.chunk.gradient]
            self.gradients = max(self.gradients, len(sums))


@pytest.mark.parametrize("grid", GRIDS, ids=GRID_IDS)
def test_every_pair_once_and_every_gradient_home_from_everyone(grid):
    everyone = set(range(grid.size))
    for schedule, own_last in product(schedules(grid), (False, True)):
        play = Play(schedule, own_last)
        assert play.pairs == Counter(Pair(i, j) for i in everyone for j in everyone)
        assert not any(play.held), "a chunk was never given up"
        for rank, sums in enumerate(play.sums):
            home = {Chunk("d" + schedule.side, rank): everyone} if schedule.gradients else {}
            assert {chunk: added for chunk, added in sums.items() if added} == home


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


@pytest.mark.parametrize("grid", GRIDS, ids=GRID_IDS)
def test_few_buffers_whatever_the_size_of_the_grid(grid):
    for schedule in schedules(grid):
        play = Play(schedule)
        assert play.travelling == most_travelling(schedule), schedule
        assert play.gradients == most_gradients(schedule), schedule


@pytest.mark.parametrize("grid", GRIDS, ids=GRID_IDS)
def test_hop_counts_are_the_published_table(grid):
    """Flat G - 1; two levels M (L - 1) within the node and M - 1 between; gradients alike."""
    for schedule in schedules(grid):
        for rank in range(grid.size):
            wanted = oracle.hops(schedule.algorithm, *grid, rank)
            for gradient in {False, schedule.gradients}:
                hops = [h for h in schedule.sends(rank) if h.chunk.gradient == gradient]
                got = Counter(hop.link for hop in hops)
                assert {"intra": got["intra"], "inter": got["inter"]} == wanted


@pytest.mark.parametrize(("algorithm", "side"), list(product(ALGORITHMS, SIDES)))
@pytest.mark.parametrize("grid", [Grid(1, 4), Grid(4, 1), Grid(2, 4), Grid(4, 2), Grid(3, 3)])
def test_what_overlaps_with_what(grid, algorithm, side):
    """Activations and delayed gradients travel during one step, between nodes during a cycle;
    double_ring's gradients block."""
    for rank in range(grid.size):
        for hop in backward(algorithm, grid, side).sends(rank):
            steps = 1
            if algorithm != "ring" and hop.ring == "inter":
                steps = grid.intra
            if algorithm == "double_ring" and hop.chunk.gradient:
                steps = 0
            assert hop.land - hop.post == steps, hop


@pytest.mark.parametrize("algorithm", ["burst", "double_ring"])
@pytest.mark.parametrize("grid", [Grid(1, 5), Grid(5, 1)])
def test_one_node_or_one_rank_per_node_is_the_flat_ring(grid, algorithm):
    one, other = forward(algorithm, grid), forward("ring", grid)
    for rank in range(5):
        got = [hop._replace(ring="") for hop in one.sends(rank)]
        assert got == [hop._replace(ring="") for hop in other.sends(rank)]
        assert {hop.link for hop in got} == {"intra" if grid.inter == 1 else "inter"}


def test_a_ring_of_four_by_hand():
    """Rank 1 computes with its own keys, then with those of ranks 0, 3 and 2."""
    pairs = [boundary.pair for boundary in forward("ring", Grid(1, 4)).program(1)]
    assert [pair and pair.key for pair in pairs] == [1, 0, 3, 2, None]


def test_two_by_two_by_hand():
    """Rank 3 (node 1, index 1) finishes its own node before the other node's chunks come."""
    pairs = [boundary.pair for boundary in backward("burst", Grid(2, 2), "query").program(3)]
    assert [pair and pair.query for pair in pairs[:4]] == [3, 2, 1, 0]
    assert set(pairs[4:]) == {None}


@pytest.mark.parametrize("grid", [Grid(1, 4), Grid(2, 2), Grid(4, 2)])
def test_rings_carry_only_their_own_members(grid):
    for algorithm in ALGORITHMS:
        for rank in range(grid.size):
            for hop in backward(algorithm, grid, "kv").sends(rank):
                same_node = hop.src // grid.intra == hop.dst // grid.intra
                same_index = hop.src % grid.intra == hop.dst % grid.intra
                assert hop.link == ("intra" if same_node else "inter")
                assert {"flat": True, "intra": same_node, "inter": same_index}[hop.ring]
                assert (hop.ring == "flat") == (algorithm == "ring")


@pytest.mark.parametrize("grid", GRIDS[1:], ids=GRID_IDS[1:])
def test_channels_are_what_hops_travel_on(grid):
    """A plan makes a communicator for each; one that is missing would be missed in mid-call."""
    some = np.random.default_rng(grid.size).random((grid.size, grid.size)) < 0.4
    everything = np.ones_like(some)
    for algorithm, route, visible in product(
        (*ALGORITHMS, "all_gather"), ("ring", "direct"), (everything, some)
    ):
        passes = [forward(algorithm, grid, visible=visible, route=route)]
        passes += [
            backward(algorithm, grid, side, gradients=gradients, visible=visible, route=route)
            for side, gradients in product(SIDES, (True, False))
        ]
        for each in passes:
            hops = {
                (hop.ring, hop.chunk.gradient)
                for rank in range(grid.size)
                for hop in each.sends(rank)
            }
            wanted = set(each.channels)
            assert hops == wanted if visible is everything else hops <= wanted


def test_the_own_pair_may_come_last():
    """Rank 1 of a ring of four computes its own pair while the last gradient travels (posted at
    4); rank 1 of 2 x 2 while the other node's share does (posted at 5, after the node's sum)."""
    pairs = [b.pair for b in backward("ring", Grid(1, 4), "query").program(1, own_last=True)]
    assert [pair and pair.query for pair in pairs] == [None, 0, 3, 2, 1, None]
    pairs = [b.pair for b in backward("burst", Grid(2, 2), "query").program(1, own_last=True)]
    assert [pair and pair.query for pair in pairs] == [None, 0, 3, 2, None, 1, None, None]
    forward_pairs = [b.pair for b in forward("ring", Grid(1, 4)).program(1, own_last=True)]
    assert forward_pairs[0] == Pair(1, 1), "no gradient travels: nothing to hide"


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"algorithm must be one of .*double_ring.*got 'rings'"):
        forward("rings", Grid(1, 2))
    with pytest.raises(ValueError, match=r"algorithm must be one of .*burst.*got ''"):
        backward("", Grid(1, 2), "kv")
    with pytest.raises(ValueError, match="side must be one of kv, query or auto, got 'q'"):
        backward("ring", Grid(1, 2), "q")


# --- sparse masks, direct sends, all_gather, kept chunks -----------------------------------

tables = st.integers(0, 2**32 - 1).map(np.random.default_rng)


@given(
    st.sampled_from(("burst", "double_ring", "ring", "all_gather")),
    st.sampled_from([Grid(1, 1), Grid(1, 5), Grid(4, 1), Grid(2, 3), Grid(3, 2), Grid(3, 3)]),
    st.sampled_from(SIDES), st.sampled_from(("ring", "direct")), st.integers(0, 8),
    st.floats(0, 1), tables,
)  # fmt: skip
def test_only_what_is_visible_is_computed_and_all_of_it(
    algorithm, grid, side, route, kept, density, random
):
    """The rules of `Play` hold for any table; each owner hears from exactly those who see it."""
    visible = random.random((grid.size, grid.size)) < density
    kept = min(kept, grid.size - 1) if side == "kv" else 0
    schedule = backward(algorithm, grid, side, visible=visible, route=route, kept=kept)
    play = Play(schedule, own_last=bool(random.integers(2)))
    assert play.pairs == Counter(Pair(*pair) for pair in np.argwhere(visible).tolist())
    for owner in range(grid.size):
        users = visible[:, owner] if side == "kv" else visible[owner]
        home = play.sums[owner][Chunk("d" + side, owner)]
        assert home == set(np.flatnonzero(users).tolist())


def test_nothing_is_sent_that_nobody_needs():
    """Contiguous causal on four ranks: rank 3 keeps its keys, rank 0 sends its own all the way."""
    schedule = forward("ring", Grid(1, 4), visible=np.tri(4, dtype=bool))
    sent = [[hop.chunk.owner for hop in schedule.sends(rank)] for rank in range(4)]
    assert sent == [[0], [1, 0], [2, 1, 0], []]


def test_direct_sends_hold_two_chunks_and_all_gather_holds_all():
    everyone = np.ones((6, 6), dtype=bool)
    direct = forward("ring", Grid(1, 6), visible=everyone, route="direct")
    assert Play(direct).travelling == 2
    assert Play(forward("all_gather", Grid(1, 6))).travelling == 5


def test_kept_chunks_are_the_farthest_and_are_not_sent():
    schedule = backward("ring", Grid(1, 4), "kv", kept=2)
    assert [chunk.owner for chunk in schedule.kept_chunks(0)] == [2, 1]
    sent = [hop for hop in schedule.sends(0) if not hop.chunk.gradient]
    assert [hop.chunk.owner for hop in sent] == [0]

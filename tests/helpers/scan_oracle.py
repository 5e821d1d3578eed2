"""What ranks know when they run a table of hops: by affine maps with numbers, block by block.

Written without a look at how the package runs tables: a rank knows the maps of its own pieces, the
states before documents, and what it received in earlier rounds.
"""

import numpy as np

from megatron_burst.layout import Balanced, Contiguous, DocumentZigzag, Zigzag
from megatron_burst.schedule.scans.hops import ALL_BLOCKS, MAP, STATE


class Problem:
    """Random maps of states with `width` rows: of piece i, block b: transition [i, b], increment
    [i, b]; and the state before each document."""

    def __init__(self, chains, blocks, seed=0, width=2):
        rng = np.random.default_rng(seed)
        self.chains, self.blocks = chains, blocks
        pieces = len(chains)
        self.transition = rng.normal(size=(pieces, blocks, width, width))
        self.increment = rng.normal(size=(pieces, blocks, width))
        self.initial = rng.normal(size=(chains.documents, blocks, width))

    def entering(self):
        """[pieces, blocks, width]: the states that enter, one piece after the other."""
        states, found = self.initial.copy(), []
        for piece, document in enumerate(self.chains.document):
            found.append(states[document].copy())
            for b in range(self.blocks):
                states[document, b] = (
                    self.transition[piece, b] @ states[document, b] + self.increment[piece, b]
                )
        return np.array(found)


class Knowledge:
    """Of one rank."""

    def __init__(self, problem, rank):
        self.problem = problem
        self.states = {}
        self.maps = {}  # (first, last, block) -> (transition, increment)
        for piece in np.flatnonzero(problem.chains.rank == rank).tolist():
            for b in range(problem.blocks):
                one = (problem.transition[piece, b], problem.increment[piece, b])
                self.maps[piece, piece, b] = one

    def learn(self, kind, first, last, block, content):
        for b, value in content.items():
            if kind == STATE:
                self.states[first, b] = value
            else:
                self.maps[first, last, b] = value

    def content(self, kind, first, last, block):
        """What a hop carries, or None where this rank does not know it: block -> value."""
        blocks = range(self.problem.blocks) if block == ALL_BLOCKS else [block]
        by = self.state if kind == STATE else lambda piece, b: self.map(piece, last, b)
        found = {b: by(first, b) for b in blocks}
        return None if any(value is None for value in found.values()) else found

    def state(self, piece, b):
        if (piece, b) in self.states:
            return self.states[piece, b]
        chains = self.problem.chains
        if chains.begins[piece]:
            return self.problem.initial[chains.document[piece], b]
        for first, last, block in self.maps:
            if last == piece - 1 and block == b:
                before = self.state(first, b)
                if before is not None:
                    transition, increment = self.maps[first, last, b]
                    return transition @ before + increment
        return None

    def map(self, first, last, b):
        for start, stop, block in self.maps:
            if (start, block) == (first, b) and stop <= last:
                one = self.maps[start, stop, b]
                rest = self.map(stop + 1, last, b) if stop < last else None
                if stop == last:
                    return one
                if rest is not None:
                    return rest[0] @ one[0], rest[0] @ one[1] + rest[1]
        return None


def play(hops, problem):
    """What every rank knows in the end. Raises AssertionError where one sends what it has not."""
    ranks = [Knowledge(problem, rank) for rank in range(problem.chains.ranks)]
    rows = list(zip(*(column.tolist() for column in hops), strict=True))
    assert rows == sorted(rows, key=lambda row: row[0])
    rounds = sorted({row[0] for row in rows})
    assert rounds == list(range(len(rounds)))
    for count in rounds:
        sent = []
        for row in rows:
            if row[0] == count:
                _, source, destination, kind, first, last, block = row
                assert source != destination
                assert kind in (STATE, MAP)
                assert problem.chains.document[first] == problem.chains.document[last]
                content = ranks[source].content(kind, first, last, block)
                assert content is not None, f"rank {source} cannot send {row}"
                sent.append((destination, (kind, first, last, block, content)))
        for destination, hop in sent:
            ranks[destination].learn(*hop)
    return ranks


def check(hops, problem):
    """Every rank ends with the state that enters each of its pieces."""
    ranks, wanted = play(hops, problem), problem.entering()
    for piece, rank in enumerate(problem.chains.rank.tolist()):
        for b in range(problem.blocks):
            got = ranks[rank].state(piece, b)
            assert got is not None, f"rank {rank} has no state that enters piece {piece}"
            np.testing.assert_allclose(got, wanted[piece, b], rtol=1e-9, atol=1e-9)


def cases(ranks, per_node):
    """(layout, bounds) of sequences over so many ranks, packed and not."""
    each = 2 * ranks
    yield Contiguous(ranks), [0, 2 * each]
    yield Zigzag(ranks), [0, 2 * each]
    yield Contiguous(ranks), sorted([0, 3, 3, each, 3 * each - 1, 4 * each])
    yield Zigzag(ranks), [0, 1, each + 1, 4 * each]
    packed = [0, 2 * each, 2 * each, 3 * each]
    yield DocumentZigzag(ranks, packed), packed
    long, short = 5 * ranks, [ranks + 1, 3, 1, 2, 0, 4]
    packed = np.cumsum([0, *short, long, -sum(short) % ranks]).tolist()
    yield Balanced(ranks, packed, per_node=per_node), packed

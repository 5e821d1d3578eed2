"""`tables_oracle` itself: tables made by hand pass, and each broken rule is told in words.

Three ranks of two rows, all of which see each other. Each row is a bundle of its own: sets 1 and 2,
together 3.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from tables_oracle import Hop, _Sum, act_out, deadlocks

from megatron_burst.schedule.bundles import bundled
from megatron_burst.schedule.demand import BACKWARD, FORWARD
from megatron_burst.schedule.program import program
from megatron_burst.schedule.tables import (
    ALL,
    FAMILIES,
    RINGS,
    Grid,
    Pairs,
    Tables,
    Transfers,
)

GRID, SEEN = Grid(1, 3), np.ones((6, 6), dtype=bool)
OWN = [(rank, 0, rank, rank, ALL, ALL) for rank in range(3)]  # rank, step, query, key, rows of both

# Backward, keys travel: those of rank 0 to rank 1 in two parts, and one by one on to rank 2, from
# where its gradients come back the same way; all others straight.
PAIRS = [
    *OWN,
    (1, 1, 1, 0, ALL, 3), (1, 1, 1, 2, ALL, 3), (0, 1, 0, 1, ALL, 3), (0, 1, 0, 2, ALL, 3),
    (2, 1, 2, 1, ALL, 3), (2, 2, 2, 0, ALL, 1), (2, 3, 2, 0, ALL, 2),
]  # fmt: skip
COPIES = [  # family, owner, rows, src, dst, ring, post, land
    ("kv", 0, 1, 0, 1, "flat", 0, 1), ("kv", 0, 2, 0, 1, "intra", 0, 1),
    ("kv", 0, 1, 1, 2, "flat", 1, 2), ("kv", 0, 2, 1, 2, "flat", 1, 3),
    ("kv", 1, 3, 1, 0, "flat", 0, 1), ("kv", 1, 3, 1, 2, "flat", 0, 1),
    ("kv", 2, 3, 2, 0, "flat", 0, 0), ("kv", 2, 3, 2, 1, "flat", 0, 1),
]  # fmt: skip
GRADIENTS = [
    ("dkv", 0, 3, 2, 1, "flat", 4, 5), ("dkv", 0, 3, 1, 0, "flat", 5, 5),
    ("dkv", 1, 3, 0, 1, "flat", 2, 3), ("dkv", 1, 1, 2, 1, "flat", 2, 3),
    ("dkv", 1, 2, 2, 1, "flat", 2, 4), ("dkv", 2, 3, 0, 2, "flat", 2, 3),
    ("dkv", 2, 3, 1, 2, "flat", 2, 3),
]  # fmt: skip
RING = [*COPIES, *GRADIENTS]

# Forward, a tile of two ranks: rank 1 computes everything of query 0 with key 1, and sends it home.
TILE_PAIRS = [
    *OWN, (1, 1, 0, 1, 3, ALL), (0, 1, 1, 0, 1, ALL), (0, 2, 1, 0, 2, ALL),
    (2, 1, 0, 2, 3, ALL), (2, 2, 1, 2, 3, ALL), (2, 1, 2, 0, ALL, 3), (2, 1, 2, 1, ALL, 3),
]  # fmt: skip
TILE = [
    ("query", 0, 3, 0, 1, "flat", 0, 1), ("query", 1, 1, 1, 0, "flat", 0, 1),
    ("query", 1, 2, 1, 0, "flat", 1, 2), ("query", 0, 3, 0, 2, "flat", 0, 1),
    ("query", 1, 3, 1, 2, "flat", 0, 2), ("kv", 0, 3, 0, 2, "flat", 0, 1),
    ("kv", 1, 3, 1, 2, "flat", 0, 1), ("out", 0, 3, 1, 0, "flat", 2, 3),
    ("out", 1, 1, 0, 1, "flat", 2, 3), ("out", 1, 2, 0, 1, "flat", 3, 4),
    ("out", 0, 3, 2, 1, "flat", 2, 2), ("out", 1, 3, 2, 1, "flat", 3, 3),
]  # fmt: skip
# What rank 2 computed for query 0 goes home through rank 1, in one message with rank 1's own.
TILE[7] = ("out", 0, 3, 1, 0, "flat", 3, 4)


def columns(kind, lines):
    return kind(*np.array(lines, dtype=np.int64).reshape(-1, len(kind._fields)).T)


def tables(pairs, hops, size=3, steps=4):
    rows = np.tile([0, 1], size)
    owner = np.repeat(np.arange(size), 2)
    wanted = np.ones((2 * size, size), dtype=bool)
    wanted[rows == 1, :] = False  # rows that nobody wants differ from the others
    bundles = bundled(owner, rows, np.ones_like(rows), wanted)
    lines = [
        (FAMILIES.index(family), owner, rows, src, dst, RINGS.index(ring), post, land)
        for family, owner, rows, src, dst, ring, post, land in hops
    ]
    return Tables(steps, columns(Pairs, pairs), columns(Transfers, lines), bundles, bundles)


def play(pairs, hops, row_bytes=BACKWARD, seen=SEEN, grid=GRID, **more):
    """Act out the tables, and then each rank's program of them."""
    made = tables(pairs, hops, grid.size, **more)
    act_out(made, grid, seen, row_bytes=row_bytes)
    programs = [program(made, grid, rank) for rank in range(grid.size)]
    return act_out(made, grid, seen, row_bytes=row_bytes, programs=programs)


def changed(lines, at, **fields):
    """`lines` with one field or more of one of them changed."""
    names = ("family", "owner", "rows", "src", "dst", "ring", "post", "land")
    if len(lines[at]) == 6:
        names = ("rank", "step", "query", "key", "query_rows", "key_rows")
    line = {**dict(zip(names, lines[at], strict=True)), **fields}
    return [*lines[:at], tuple(line.values()), *lines[at + 1 :]]


def test_what_is_right_passes():
    played = play(PAIRS, RING)
    assert played.most_held == 3
    assert played.most_partial == {"dkv": 6, "dquery": 1, "out": 0}
    play(TILE_PAIRS, TILE, row_bytes=FORWARD)


def test_rows_that_are_of_no_use():
    alone = np.kron(np.eye(3, dtype=bool), np.ones((2, 2), dtype=bool))
    hops = [("kv", 0, 3, 0, 1, "flat", 0, 1), ("kv", 0, 2, 1, 2, "flat", 1, 2)]
    pairs = [*OWN, (2, 2, 2, 0, ALL, 2)]
    made = tables(pairs, hops)
    programs = [program(made, GRID, rank) for rank in range(3)]
    for how in (None, programs):
        with pytest.raises(AssertionError, match=r"rank 1 received kv of 0, rows \[0\], unused"):
            act_out(made, GRID, alone, row_bytes=FORWARD, programs=how)
    play(pairs, changed(hops, 0, rows=2), seen=alone, row_bytes=FORWARD)


def test_results_to_which_nothing_visible_was_added_are_not_left_behind_either():
    alone = np.kron(np.eye(3, dtype=bool), np.ones((2, 2), dtype=bool))
    hops, pairs = [("kv", 0, 2, 0, 1, "flat", 0, 1)], [*OWN, (1, 1, 1, 0, ALL, 2)]
    with pytest.raises(AssertionError, match="rank 1 keeps row 1 of dkv of 0"):
        play(pairs, hops, seen=alone)
    play(pairs, [*hops, ("dkv", 0, 2, 1, 0, "flat", 2, 3)], seen=alone)
    with pytest.raises(AssertionError, match="nothing was added to row 0"):
        play(pairs, [*hops, ("dkv", 0, 3, 1, 0, "flat", 2, 3)], seen=alone)


BROKEN = [
    # pairs
    ("never named: query row 0 of rank 1, key row 0 of rank 0", PAIRS[:3] + PAIRS[4:], RING),
    ("a second time: query row, key row .0, 0.", [*PAIRS, (1, 2, 1, 0, ALL, 1)], RING),
    ("rank 2: queries of 2 with keys of 0 at step 1: it does not have row .0.",
     changed(PAIRS, 8, step=1), RING),
    ("at step 4 of 4", changed(PAIRS, 8, step=4), RING),
    ("the own query chunk is taken whole, not set 0x3", changed(PAIRS, 3, query_rows=3), RING),
    ("-1 is no set of rows of another rank's chunk", changed(PAIRS, 3, key_rows=ALL), RING),
    ("0 is no set of rows", PAIRS, changed(RING, 4, rows=0)),
    ("rank 1 has no bundles .2.", PAIRS, changed(RING, 4, rows=7)),
    # A message with both rows is computed with whole, whatever a pair names of it.
    ("at step 3: a second time: query row, key row .0, 0.", PAIRS,
     changed(RING[:3] + RING[4:], 2, rows=3, src=0)),
    # transfers
    ("it lands before it is posted", PAIRS, changed(RING, 2, post=2, land=1)),
    ("to itself", PAIRS, changed(RING, 4, dst=1)),
    ("the owner has it", PAIRS, changed(RING, 2, dst=0)),
    ("no such rank", PAIRS, changed(RING, 4, dst=3)),
    ("not members of one ring", PAIRS, changed(RING, 4, ring="inter")),
    ("the sender has these rows in no one message .2 held.", PAIRS,
     changed(RING[:3] + RING[4:], 2, rows=3)),
    ("the sender has these rows in no one message .0 held.", PAIRS, changed(RING, 2, post=0)),
    # What blocks is not there yet when the boundary's messages start.
    ("the sender has these rows in no one message .1 held.", PAIRS, changed(RING, 0, post=1)),
    ("row 0 comes a second time", PAIRS, [*RING, ("kv", 0, 1, 0, 2, "flat", 0, 3)]),
    # partial results
    ("dkv of 0: row 0 came home without what row 2 adds", PAIRS, RING[:9] + RING[10:]),
    ("dkv of 0: row 0 came home without what row 4 adds", PAIRS, changed(RING, 9, post=4)),
    ("dkv of 1: row 1 came home without what row 4 adds", PAIRS, RING[:12] + RING[13:]),
    ("nothing was added to row 0", PAIRS, [*RING, ("dkv", 1, 1, 0, 1, "flat", 3, 4)]),
    ("nothing was added to row 0", PAIRS, changed(RING, 10, post=1)),
    ("what the owner itself adds never travels", PAIRS, [*RING, ("dkv", 1, 3, 1, 0, "flat", 1, 2)]),
]  # fmt: skip


@pytest.mark.parametrize(("words", "pairs", "hops"), BROKEN)
def test_what_is_wrong_is_told(words, pairs, hops):
    with pytest.raises(AssertionError, match=words):
        act_out(tables(pairs, hops), GRID, SEEN, row_bytes=BACKWARD)


def test_nothing_is_counted_twice(monkeypatch):
    """Who sends clears what it sends, so no table can do it: here sending does not clear."""
    monkeypatch.setattr(_Sum, "take", lambda self, rows: self.counted * rows[:, None])
    with pytest.raises(AssertionError, match=r"dkv of 1 .* row 0 counts row 0 a second time"):
        play(PAIRS, [*RING, ("dkv", 1, 1, 0, 1, "flat", 3, 4)])


def test_who_may_exchange_within_and_between_nodes():
    grid, seen = Grid(2, 2), np.kron(np.eye(4, dtype=bool), np.ones((2, 2), dtype=bool))
    own = [(rank, 0, rank, rank, ALL, ALL) for rank in range(4)]
    for ring, fits in (("intra", {1}), ("inter", {2}), ("flat", {1, 2, 3})):
        for dst in (1, 2, 3):
            mine = seen.copy()
            mine[2 * dst : 2 * dst + 2, :2] = True
            some = [*own, (dst, 1, dst, 0, ALL, 3)]
            hops = [("kv", 0, 3, 0, dst, ring, 0, 1)]
            how = {"row_bytes": FORWARD, "grid": grid, "seen": mine}
            if dst in fits:
                play(some, hops, **how)
                continue
            with pytest.raises(AssertionError, match="not members of one ring"):
                play(some, hops, **how)


def test_what_does_not_travel_in_a_pass():
    with pytest.raises(AssertionError, match="dkv does not travel in this pass"):
        play(PAIRS, RING, row_bytes=BACKWARD._replace(dkv=0))
    play(PAIRS, COPIES, row_bytes=BACKWARD._replace(dkv=0))
    with pytest.raises(AssertionError, match="out does not travel in this pass"):
        play(TILE_PAIRS, TILE, row_bytes=FORWARD._replace(out=0))
    with pytest.raises(AssertionError, match="out of 1: row 0 came home without what row 0 adds"):
        play(TILE_PAIRS, TILE[:8] + TILE[9:], row_bytes=FORWARD)


def test_the_columns_must_fit_the_bundles():
    with pytest.raises(AssertionError, match=r"seen is \(5, 6\), the bundles have \(6, 6\)"):
        act_out(tables(PAIRS, RING), GRID, SEEN[1:], row_bytes=BACKWARD)
    made = tables(PAIRS, RING)
    runs = made.keys.runs
    for first, words in ((np.zeros(6), "is in two bundles"), (7 + runs.first, "lacks rows")):
        wrong = SimpleNamespace(
            owner=made.keys.owner, number=made.keys.number,
            runs=runs._replace(first=np.where(runs.bundle < 2, first, runs.first).astype(int)),
        )  # fmt: skip
        with pytest.raises(AssertionError, match=words):
            act_out(made._replace(keys=wrong), GRID, SEEN, row_bytes=BACKWARD)


# --- programs ---------------------------------------------------------------------------------


def edited(rank, at, **fields):
    """The programs of the ring of three with one boundary of a rank changed by functions."""
    made = tables(PAIRS, RING)
    programs = [list(program(made, GRID, each)) for each in range(3)]
    old = programs[rank][at]
    new = {name: how(getattr(old, name)) for name, how in fields.items()}
    programs[rank][at] = type(old)(**{**old.__dict__, **new})
    return made, programs


@pytest.mark.parametrize(
    ("rank", "at", "fields", "words"),
    [
        (0, 0, {"posts": lambda posts: posts[1:]}, "it is in the programs of ranks .1."),
        (0, 0, {"posts": lambda posts: (*posts, posts[0])}, "it is in the programs of ranks"),
        (2, 0, {"posts": lambda posts: posts[1:] and (posts[0],)}, "in the programs of ranks"),
        (1, 0, {"index": lambda index: index + 1}, "rank 1: boundary 1 is number 0"),
        (1, 1, {"pairs": lambda pairs: pairs[1:]}, "pairs in tables only: .*query=1, key=0"),
        (1, 3, {"release": lambda chunks: ()}, "rank 1 never releases kv of 0"),
    ],
)
def test_programs_that_differ_from_the_tables(rank, at, fields, words):
    made, programs = edited(rank, at, **fields)
    with pytest.raises(AssertionError, match=words):
        act_out(made, GRID, SEEN, row_bytes=BACKWARD, programs=programs)


def test_a_release_that_is_early_or_of_what_is_not_there():
    made, programs = edited(1, 3, release=lambda chunks: ())
    late = [chunk for chunk in program(made, GRID, 1)[3].release if chunk.owner == 0]
    assert late  # set 2 of rank 0, which is being sent until then
    for at, words in (
        (2, "releases kv of 0 .set 0x2. while it is sent"),
        (0, "it has no such message"),
    ):
        early = [list(each) for each in programs]
        old = early[1][at]
        early[1][at] = type(old)(**{**old.__dict__, "release": (*old.release, *late)})
        with pytest.raises(AssertionError, match=words):
            act_out(made, GRID, SEEN, row_bytes=BACKWARD, programs=early)


def test_orders_in_which_ranks_wait_for_ever():
    """Two rings of which the ranks start another one first: each waits for the other's."""
    hops = [
        Hop("kv", 0, 1, 0, 1, ring, 0, land) for ring, land in (("flat", 1), ("intra", 1))
    ]  # fmt: skip
    assert not deadlocks(hops, (1, 2))
    said = deadlocks(hops, (1, 2), order=lambda rank, batch: (batch[1] == "flat") ^ rank)
    assert said.startswith("deadlock: rank 0 at ('wait', (0, 'intra', False, 1)); rank 1 at")

"""An algorithm that the package has not seen: a function and a name in the registry, no more.

"detour" uses what tables can say and no algorithm of the package does all at once. Of queries of
rank i and keys of rank j:

- i = j: at home, first.
- i = j + 1: the queries travel to the keys; a partial output (backward: dQ) goes back.
- else: the keys travel in two parts by two routes, the first half of the rows straight to i, the
  second by way of rank j + 1, which has no use for it itself. Both are computed with in one pair,
  and their gradients go home by the same routes.
"""

import argparse
from dataclasses import replace
from functools import reduce
from operator import or_

import cases
import numpy as np
import oracle
import pytest
import torch
from tables_oracle import act_out, dense

import megatron_burst as mb
from megatron_burst.autotune.rates import Rates
from megatron_burst.autotune.simulator import pass_time
from megatron_burst.cli import main as cli
from megatron_burst.planning import build
from megatron_burst.plugins.testing import in_process
from megatron_burst.plugins.tools import show
from megatron_burst.schedule.algorithms import ALGORITHMS, Algorithm, direct
from megatron_burst.schedule.demand import RowBytes, visibility_of
from megatron_burst.schedule.rings import backward, forward
from megatron_burst.schedule.tables import ALL, FAMILIES, Chunk, Grid, Hop, Pairs, Tables, Transfers

FORWARD, BACKWARD = RowBytes(kv=2, query=1, dkv=0, dquery=0, out=3), RowBytes(2, 4, 4, 2)


def detour(demand):
    size, queries = demand.grid.size, demand.visibility.queries
    keys = demand.visibility.keys.split(2)
    first = keys.number % 2 == 0
    straight, relayed = (keys.bits(keys.users & half[:, None]) for half in (first, ~first))
    asked = queries.bits(queries.users)  # [owner, rank]: of the owner's rows, those the rank wants
    pairs, moved = [], []

    def send(family, owner, rows, src, dst, post, land):
        if rows and getattr(demand.row_bytes, family):
            moved.append((FAMILIES.index(family), owner, int(rows), src, dst, 0, post, land))

    for j in range(size):
        relay, users = (j + 1) % size, [((j + t) % size, t) for t in range(2, size)]
        if demand.visible[j, j]:
            pairs.append((j, 0, j, j, ALL, ALL))
        if size > 1 and asked[relay, j]:
            rows = int(asked[relay, j])
            send("query", relay, rows, relay, j, 0, 1)
            pairs.append((j, 1, relay, j, rows, ALL))
            for family in ("out", "dquery"):
                send(family, relay, rows, j, relay, 2, 3)
        through = reduce(or_, (relayed[j, i] for i, _ in users), 0)
        send("kv", j, through, j, relay, 0, 1)
        for i, t in users:
            send("kv", j, straight[j, i], j, i, 0, t)
            send("kv", j, relayed[j, i], relay, i, 1, t)
            rows = int(straight[j, i] | relayed[j, i])
            if rows:
                pairs.append((i, t, i, j, ALL, rows))
            send("dkv", j, straight[j, i], i, j, t + 1, t + 2)
            send("dkv", j, relayed[j, i], i, relay, t + 1, t + 2)
        send("dkv", j, through, relay, j, size + 1, size + 2)

    def columns(rows, kind):
        return kind(*np.array(rows, dtype=np.int64).reshape(-1, len(kind._fields)).T)

    tables = columns(pairs, Pairs), columns(moved, Transfers)
    return Tables(size, *tables, queries, keys)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(ALGORITHMS, "detour", Algorithm(detour))


# --- by the rules ---------------------------------------------------------------------------

GRIDS = [(1, 1), (1, 2), (1, 3), (2, 2), (1, 5), (4, 2)]
MASKS = {"full": mb.masks.Full(), "causal": mb.masks.Causal(), "window": mb.masks.Window(5, 0)}


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("grid", GRIDS)
def test_its_tables_are_right(grid, mask, layout):
    grid, mask = Grid(*grid), MASKS[mask]
    spans = mb.layout.make(layout, cp_size=grid.size)
    shards = [spans.spans(rank, 6 * grid.size) for rank in range(grid.size)]
    visibility, seen = visibility_of(mask, shards, shards), dense(mask, shards)
    there = forward("detour", grid, visibility=visibility, row_bytes=FORWARD)
    back = backward("detour", grid, "kv", visibility=visibility, row_bytes=BACKWARD)
    for schedule in (there, back):
        act_out(schedule, grid, seen)


def test_it_has_what_it_is_to_prove():
    """A relay that computes nothing with what it relays, parts, and both partial families."""
    tables = forward("detour", Grid(1, 4)).tables
    assert "out" in {FAMILIES[family] for family in tables.transfers.family}
    visibility = visibility_of(
        mb.masks.Full(), *[[[mb.layout.Span(4 * r, 1, 4)] for r in range(4)]] * 2
    )
    moved = backward("detour", Grid(1, 4), "kv", visibility=visibility).tables.transfers
    parts = [
        (h.src, h.post) for h in moved.hops(Grid(1, 4)) if h.dst == 2 and h.chunk[:2] == ("kv", 0)
    ]
    assert parts == [(0, 0), (1, 1)]
    families = {FAMILIES[family] for family in moved.family}
    assert families == {"kv", "query", "dkv", "dquery"}


# --- through attention ----------------------------------------------------------------------


def case(grid, layout, mask, heads=(4, 2)):
    length = 6 * grid[0] * grid[1]
    problem = cases.Problem(mask, heads, 2, (5, 3), length)
    return cases.Case(*grid, "detour", layout, "auto", "reference", problem)


def bytes_by_hand(rank, size, rows=6, batch=2, heads=4, kv_heads=2, d=5, w=3):
    """What `rank` sends in one forward and one backward where all see everything, in float64.

    As owner, as relay and as user of keys; as owner of queries; as the one who computes with them.
    """
    kv, query, out = (8 * batch * n for n in (kv_heads * (d + w), heads * d, heads * w))
    stat = 8 * batch * heads
    second = rows // 2  # all rows have one reader more or less: one bundle, in two halves
    keys = (rows - second) * (size - 2) + second + second * (size - 2)
    gradients = rows * (size - 2) + second
    forward = keys * kv + rows * query + rows * (out + stat)
    backward = keys * kv + gradients * kv + rows * (query + out + 2 * stat) + rows * query
    return forward + backward


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("layout", ["zigzag", "striped"])
@pytest.mark.parametrize("grid", [(1, 2), (1, 3), (2, 2), (1, 6)])
def test_attention_runs_it(grid, layout, mask):
    one = case(grid, layout, mask)
    *qkv, douts = zip(*cases.shards(one, cases.solve(one.problem)[0]), strict=True)
    leaves = [x.requires_grad_() for xs in qkv for x in xs]
    groups = in_process.groups(inter=grid[0], intra=grid[1])
    plan = in_process.prepare(*map(list, qkv), groups=groups, **cases.choices(one))
    outs = in_process.attention(*map(list, qkv), plan=plan)
    grads = torch.autograd.grad(outs, leaves, douts)
    size = one.size
    results = zip(outs, grads[:size], grads[size : 2 * size], grads[2 * size :], strict=True)
    truth = cases.shards(one, cases.solve(one.problem)[1])
    for rank, (got, right) in enumerate(zip(results, truth, strict=True)):
        for name, mine, wanted_ in zip(("out", "dq", "dk", "dv"), got, right, strict=True):
            assert oracle.worst(mine, wanted_) <= cases.TOLERANCE, f"rank {rank}: {name}"
        counters = groups.ranks[rank].counters
        there, back = plan.ranks[rank].traffic()
        assert (counters.intra, counters.inter) == ((there + back).intra, (there + back).inter)
        if mask == "full" and size > 2:
            assert counters.intra + counters.inter == bytes_by_hand(rank, size)


def test_an_unknown_name_is_refused_with_the_names_of_now():
    one = case((1, 2), "zigzag", "full")
    with pytest.raises(ValueError, match=r"algorithm must be one of burst, .*detour, .*got 'tour'"):
        cases.run_in_process(one._replace(algorithm="tour"))


def test_a_part_with_visible_rows_of_another_pair_is_an_error(monkeypatch):
    """Its rows would be computed twice: a kernel call computes whole parts."""

    def twice(demand):
        keys = demand.visibility.keys.split(2)
        tables = direct.tables(replace(demand, visibility=replace(demand.visibility, keys=keys)))
        pairs = tables.pairs
        others = pairs.query != pairs.key
        halves = [pairs._replace(key_rows=np.where(others, half, ALL)) for half in (1, 2)]
        own, first, second = (
            [column[rows] for column in part]
            for part, rows in ((pairs, ~others), (halves[0], others), (halves[1], others))
        )
        columns = map(np.concatenate, zip(own, first, second, strict=True))
        return tables._replace(pairs=Pairs(*columns))

    monkeypatch.setitem(ALGORITHMS, "twice", Algorithm(twice))
    with pytest.raises(ValueError, match=r"visible rows that are not in its pair: .* are \(Pair"):
        cases.run_in_process(case((1, 3), "zigzag", "full")._replace(algorithm="twice", side="kv"))


@pytest.mark.parametrize(
    "held", [(7, 11), (), (1,)], ids=["in two messages", "in none", "only some"]
)
def test_rows_that_are_sent_are_in_one_chunk(held):
    chunks = [Chunk("kv", 0, rows) for rows in held]
    rows = build._PassRows(
        "forward",
        1,
        {("kv", 0): chunks},
        set(chunks),
        {},
        build.RowMaps(forward("detour", Grid(1, 3)).tables),
    )
    with pytest.raises(AssertionError, match=r"rank 1 cannot send Chunk\(.*owner=0, rows=3\)"):
        rows.payload(Hop(Chunk("kv", 0, 3), 1, 2, "flat", "intra", 1, 2))


# --- forecast and show ----------------------------------------------------------------------


def sizes(rows, heads=4, kv_heads=2, d=5, w=3):
    from megatron_burst.schedule.cost import Sizes

    return Sizes(rows, 2, heads, kv_heads, d, w, 8, 8, 8, (True, True, True))


def test_the_forecast_times_it():
    """Of three ranks that see everything, by hand: nothing is computed, messages cost their bytes.

    Each rank sends, of 6 rows of keys: 3 straight, 3 to the relay and 3 as relay.
    """
    size = 3
    visibility = visibility_of(
        mb.masks.Full(), *[[[mb.layout.Span(6 * r, 1, 6)] for r in range(size)]] * 2
    )
    have = sizes(6)
    there = forward("detour", Grid(1, size), visibility=visibility, row_bytes=have.forward)
    rates = Rates(intra=1e6, inter=1e6, latency=0.0, posting=0.0, compute=1.0, launch=0.0)
    actual = pass_time(there, have, np.zeros((size, size)), rates)
    row = have.forward
    assert actual.intra == pytest.approx((9 * row.kv + 6 * row.query + 6 * row.out) / 1e6)
    assert actual.seconds >= actual.intra


def test_show_draws_it(tmp_path):
    words = f"show schedule --algorithm detour --ranks 4 --mask full --out {tmp_path}/detour.png"
    assert cli.main(words.split()) == 0
    assert (tmp_path / "detour.png").stat().st_size > 10_000
    parser = argparse.ArgumentParser()
    show.add_arguments(parser)
    scene = show.scene_of(parser.parse_args(words.split()[1:]))
    sent = {(hop.chunk.family, hop.chunk.owner, hop.dst) for hop in scene.hops if hop.src == 1}
    # The keys of rank 0 pass through rank 1, those of rank 2 do not.
    assert sent == {
        ("query", 1, 0), ("kv", 1, 2), ("kv", 1, 3), ("kv", 1, 0), ("out", 2, 2), ("kv", 0, 2),
        ("kv", 0, 3),
    }  # fmt: skip


@pytest.mark.parametrize("head_chunks", [1, 2])
def test_a_message_may_be_all_rows_of_a_shard(monkeypatch, head_chunks):
    """The tensors of the owner themselves bear no envelope, and heads of them lie apart."""

    def plain(demand):
        tables = direct.tables(replace(demand, visibility=demand.visibility.whole()))
        everything = np.full_like(tables.transfers.rows, ALL)
        pairs = tables.pairs._replace(key_rows=np.full_like(tables.pairs.key_rows, ALL))
        return tables._replace(transfers=tables.transfers._replace(rows=everything), pairs=pairs)

    monkeypatch.setitem(ALGORITHMS, "plain", Algorithm(plain))
    visibility = case((2, 2), "zigzag", "full")._replace(algorithm="plain", side="kv")
    results, _ = cases.run_in_process(visibility, head_chunks=head_chunks)
    truth = cases.shards(visibility, cases.solve(visibility.problem)[1])
    for got, right in zip(results, truth, strict=True):
        for mine, its in zip(got, right, strict=True):
            assert oracle.worst(mine, its) <= cases.TOLERANCE

"""Visiting keys that rest on the host: the keys go round once, two of them are there at a time."""

import weakref

import oracle
import pytest
import row_chunk_cases as rows
import torch.distributed as dist
from row_chunk_cases import Case

import megatron_burst as mb
from megatron_burst import masks
from megatron_burst.options import algorithms
from megatron_burst.schedule.algorithms import ALGORITHMS

ABLE = [name for name, each in ALGORITHMS.items() if each.keeps]
CASES = [
    Case(grid=(1, 3, 1), algorithm="burst", chunks=4, rows=6, sink=True),
    Case(grid=(2, 2, 1), algorithm="burst", chunks=3, rows=6, mask="packed", head_chunks=0),
    Case(grid=(1, 4, 1), algorithm="ring", chunks=2, rows=6, layout="striped", side="kv"),
    Case(grid=(1, 3, 1), algorithm="double_ring", chunks=3, rows=6, mask="full"),
    Case(grid=(2, 2, 1), algorithm="all_gather", chunks=2, rows=6, layout="contiguous"),
    Case(grid=(2, 2, 1), algorithm="multicast", chunks=3, rows=6, mask="window"),
    Case(grid=(1, 4, 1), algorithm="prefetch", chunks=3, rows=6, mask="blind"),
    Case(grid=(1, 3, 1), algorithm="two_way", chunks=7, rows=6),
    Case(grid=(2, 2, 2), algorithm="hybrid", chunks=3, rows=6, sink=True),
]


def host():
    """What was not waited for is NaN."""
    return mb.HostMemory(1 << 24, strict=True, device="cpu")


def prepared(case, given, groups):
    sink = rows.problem(case)[1]
    return mb.prepare(*given[:3], groups=groups, sink=sink, needs_grad=(True,) * 3,
                      visiting="host", **case.choices())  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.algorithm)
def test_equals_the_oracle_and_the_keys_go_round_once(case):
    groups, given = rows.groups_of(case), rows.shards(case)
    plan, sink, hosts = prepared(case, given, groups), rows.problem(case)[1], []

    def run(plan, *shard):
        hosts.append(mine := host())
        return rows.chunk_by_chunk(plan, *shard, sink, False, host=mine)

    found = groups.run(run, plan.ranks, *given)
    dsink = sum(each[4] for each in found) if sink is not None else None
    assert rows.error(case, ([each[:4] for each in found], dsink)) < 1e-10
    for one, rank in zip(plan.ranks, groups.ranks, strict=True):
        there, back = one.traffic()
        assert (rank.counters.intra, rank.counters.inter) == (
            (there + back).intra, (there + back).inter
        )  # fmt: skip
        choices = case._replace(chunks=1).choices()
        alone = mb.prepare(*given[:3], groups=groups, needs_grad=(True,) * 3, **choices)
        assert there == alone.ranks[rank.rank].traffic()[0]
    assert any(each.bytes_back for each in hosts)
    assert ", received keys kept in host memory" in plan.describe()


def test_a_plan_of_the_same_groups_whose_keys_do_not_rest_is_no_base_for_it():
    case = CASES[2]
    given = rows.shards(case)

    def plan(groups, visiting):
        return mb.prepare(*given[:3], groups=groups, visiting=visiting, **case.choices()).ranks[0]

    used = rows.groups_of(case)
    plan(used, "ring")
    assert plan(used, "host").traffic() == plan(rows.groups_of(case), "host").traffic()


def on_ranks(case):
    groups = mb.Groups.flat(dist.group.WORLD)
    given = [each[groups.rank] for each in rows.shards(case)]
    mine = host()
    got = rows.chunk_by_chunk(prepared(case, given, groups), *given, None, False, host=mine)
    at, truth = case.laid()[1][groups.rank], rows.problem(case)[2]
    worst = [oracle.worst(x, y[at]) for x, y in zip(got[:4], truth[:4], strict=True)]
    return max(worst), mine.bytes_out


def test_on_real_ranks_whose_buffers_are_used_again(ranks):
    case = Case(grid=(1, 3, 1), algorithm="ring", chunks=3, mask="full", rows=12)
    found = ranks(3).run(on_ranks, case)
    assert max(error for error, _ in found) < 1e-10
    each = 12 * 2 * (8 + 4) * 8  # k and v of one rank, in bytes
    assert [out for _, out in found] == [2 * each] * 3


class Counting:
    """A host that counts what is on its way back or there, by key chunk."""

    def __init__(self):
        self.inner, self.there, self.most = host(), 0, 0

    def move(self, tensor, fraction=1.0):
        return _Counted(self, self.inner.move(tensor, fraction))


class _Counted:
    def __init__(self, owner, moved):
        self.owner, self.moved, self.fetched = owner, moved, False

    def fetch(self):
        if not self.fetched:
            self.fetched = True
            self.owner.there += 1
            self.owner.most = max(self.owner.most, self.owner.there)
        self.moved.fetch()

    def release(self):
        self.moved.release()

    def get(self):
        self.fetch()
        tensor, self.fetched = self.moved.get(), False
        weakref.finalize(tensor, self._gone)
        return tensor

    def _gone(self):
        self.owner.there -= 1


def test_the_next_keys_are_on_their_way_and_no_more():
    case = Case(grid=(1, 4, 1), algorithm="ring", chunks=2, mask="full")
    groups, given, hosts = rows.groups_of(case), rows.shards(case), []

    def run(plan, q, k, v):
        hosts.append(mine := Counting())
        call = plan.chunked(k, v, host=mine)
        for c, at in enumerate(plan.row_chunks):
            call.forward(c, q[at])

    groups.run(run, prepared(case, given, groups).ranks, *given[:3])
    assert [each.most for each in hosts] == [4] * 4  # k and v of two ranks
    assert all(each.there == 0 for each in hosts)


def test_what_cannot_be_is_refused():
    case = Case(grid=(1, 2, 1), algorithm="burst", chunks=2)
    groups, given = rows.groups_of(case), rows.shards(case)
    for name in sorted({*algorithms()} - {*ABLE, "hybrid", "ulysses"}):
        with pytest.raises(ValueError, match=f"visiting='host' wants an algorithm .* '{name}'"):
            mb.prepare(*given[:3], groups=groups, algorithm=name, visiting="host")
    with pytest.raises(ValueError, match="visiting must be one of ring, host, got 'disk'"):
        mb.prepare(*given[:3], groups=groups, visiting="disk")
    plan = prepared(case, given, groups)
    with pytest.raises(ValueError, match=r"visiting='host', which is for plan\.chunked"):
        mb.attention(*given[:3], plan=plan)
    for one, more in ((plan, {}), (mb.prepare(*given[:3], groups=groups), {"host": host()})):

        def call(one, q, k, v, more=more):
            one.chunked(k, v, **more)

        with pytest.raises(ValueError, match="host: the plan was made with visiting="):
            groups.run(call, one.ranks, *given[:3])


def test_what_is_hidden_from_all_does_not_rest_there():
    case = Case(grid=(1, 2, 1), algorithm="burst", chunks=2, layout="contiguous")
    groups, given, hosts = rows.groups_of(case), rows.shards(case), []
    choices = case.choices() | {"mask": masks.Documents([0, 12, 24]), "visiting": "host"}
    plan = mb.prepare(*given[:3], groups=groups, needs_grad=(True,) * 3, **choices)

    def run(plan, *shard):
        hosts.append(mine := host())
        rows.chunk_by_chunk(plan, *shard, None, False, host=mine)

    groups.run(run, plan.ranks, *given)
    assert [each.bytes_out for each in hosts] == [0, 0]

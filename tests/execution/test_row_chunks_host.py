"""Keys of other ranks in host memory between row chunks.

They are received once, and two chunks of keys are on the device at a time.
"""

import gc
import weakref

import oracle
import pytest
import row_chunk_cases as rows
import torch
import torch.distributed as dist
from row_chunk_cases import Case
from torch.multiprocessing.reductions import StorageWeakRef

import megatron_burst as mb
from megatron_burst import masks
from megatron_burst.options import algorithms
from megatron_burst.plugins.longseq.host import mover
from megatron_burst.plugins.testing import in_process
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
    Case(grid=(1, 2, 1), algorithm="burst", chunks=2, side="query", rows=6),
    Case(grid=(1, 1, 1), algorithm="burst", chunks=2, rows=6),
    Case(grid=(1, 2, 2), algorithm="ulysses", chunks=2, rows=6),
]


def host():
    """Return host memory in which data is NaN before its copy was waited for."""
    return mb.HostMemory(1 << 24, strict=True, device="cpu")


def prepared(case, given, groups):
    sink = rows.problem(case)[1]
    return in_process.prepare(*given[:3], groups=groups, sink=sink, needs_grad=(True,) * 3,
                      **case.choices())  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.algorithm}-{case.size}")
def test_equals_the_oracle_and_the_keys_go_round_once(case):
    groups, given = rows.groups_of(case), rows.shards(case)
    plan, sink, hosts = prepared(case, given, groups), rows.problem(case)[1], []
    alone = in_process.prepare(*given[:3], groups=rows.groups_of(case), needs_grad=(True,) * 3,
                       **case._replace(chunks=1).choices())  # fmt: skip

    def run(plan, *shard):
        hosts.append(mine := host())
        return rows.chunk_by_chunk(plan, *shard, sink, False, host=mine)

    found = groups.run(run, plan.ranks, *given)
    dsink = sum(each[4] for each in found) if sink is not None else None
    assert rows.error(case, ([each[:4] for each in found], dsink)) < 1e-10
    ring = case.size > case.grid[2]
    for one, rank in zip(plan.ranks, groups.ranks, strict=True):
        there, back = one.traffic(host=True)
        assert (rank.counters.intra, rank.counters.inter) == (
            (there + back).intra, (there + back).inter
        )  # fmt: skip
        assert there == alone.ranks[rank.rank].traffic()[0]
        assert back == one.traffic()[1]
    assert any(each.bytes_back for each in hosts) == ring
    said = "forward with keys in host memory" if ring else "the ring has one rank"
    assert said in plan.describe()


def test_full_attention_sends_keys_once_instead_of_once_per_row_chunk():
    """Four ranks of one node in a ring.

    Each sends three chunks of k [12, 1, 2, 8] and v [12, 1, 2, 4] in fp64 for every row chunk, or
    once.
    """
    case = Case(grid=(1, 4, 1), algorithm="ring", chunks=4, mask="full")
    groups, given = rows.groups_of(case), rows.shards(case)
    once = 3 * 12 * 2 * (8 + 4) * 8

    def forward(plan, q, k, v, host):
        call = plan.chunked(k, v, host=host)
        outs = [call.forward(c, q[at])[0] for c, at in enumerate(plan.row_chunks)]
        return torch.cat(outs)

    outs = []
    for hosts, times in (([None] * 4, 4), ([host() for _ in range(4)], 1)):
        for rank in groups.ranks:
            rank.counters.reset()
        outs.append(groups.run(forward, prepared(case, given, groups).ranks, *given[:3], hosts))
        assert [rank.counters.intra for rank in groups.ranks] == [times * once] * 4
        for plan in prepared(case, given, groups).ranks:
            assert plan.traffic(host=times == 1)[0].intra == times * once
    for ring, kept in zip(*outs, strict=True):
        assert torch.equal(ring, kept)


class Alive:
    """A host that records the storages of its keys."""

    def __init__(self):
        self.inner, self.storages = host(), []

    def move(self, tensor, *, framed):
        self.storages.append((tensor.nbytes, StorageWeakRef(tensor.untyped_storage())))
        return self.inner.move(tensor, framed=framed)

    def alive(self):
        """Return the bytes of received keys that are on the device."""
        gc.collect()
        return sum(nbytes for nbytes, storage in self.storages if not storage.expired())


def where_keys_are(case):
    """Return (bytes in the host arena, bytes on the device) of keys of other ranks.

    After the forward of each row chunk, and finally without the call.
    """
    groups = mb.Groups.from_topology(dist.group.WORLD, intra=3)
    given = [each[groups.rank] for each in rows.shards(case)]
    mine, plan = Alive(), prepared(case, given, groups)
    call, found = plan.chunked(*given[1:3], host=mine), []
    for c, at in enumerate(plan.row_chunks):
        call.forward(c, given[0][at])
        found.append((mine.inner.used, mine.alive()))
    del call
    gc.collect()
    return [*found, (mine.inner.used, mine.alive())]


def test_keys_are_in_the_host_arena_between_row_chunks(ranks):
    """k [12, 1, 2, 8] and v [12, 1, 2, 4] of two ranks, in fp64."""
    case = Case(grid=(1, 3, 1), algorithm="ring", chunks=3, mask="full")
    held = 2 * 12 * 2 * (8 + 4) * 8
    assert ranks(3).run(where_keys_are, case) == [[(held, 0)] * 3 + [(0, 0)]] * 3


@pytest.mark.parametrize("device", ["full", "other"])
def test_keys_that_the_host_does_not_take_are_copied(device, monkeypatch):
    """Their buffers are reused. One host is full, one moves only from another device."""
    case = Case(grid=(1, 4, 1), algorithm="ring", chunks=3, mask="full", sink=True)
    groups, given, sink = rows.groups_of(case), rows.shards(case), rows.problem(case)[1]
    if device == "other":
        monkeypatch.setattr(mover, "movable", lambda *_: False)
    spilt = []

    def run(plan, *shard):
        small = mb.HostMemory(1, strict=True, device="cpu")
        small.spill = spilt.append
        if device == "full":
            small.move(torch.zeros(small.limit // 8, dtype=torch.float64)).release()
        held = small.move(torch.zeros(small.limit // 8, dtype=torch.float64))
        found = rows.chunk_by_chunk(plan, *shard, sink, False, host=small)
        assert small.bytes_out == (held.nbytes if device == "full" else 0)
        return found

    found = groups.run(run, prepared(case, given, groups).ranks, *given)
    assert rows.error(case, ([each[:4] for each in found], sum(each[4] for each in found))) < 1e-10
    assert bool(spilt) == (device == "full")


def test_keys_belong_to_no_frame():
    """In a frame, the first fetch would fetch all of its tensors."""
    case = Case(grid=(1, 3, 1), algorithm="ring", chunks=2, mask="full")
    groups, given = rows.groups_of(case), rows.shards(case)

    def run(plan, q, k, v):
        mine = host()
        with mine.frame():
            activation = mine.move(torch.ones(8, dtype=torch.float64))
            call = plan.chunked(k, v, host=mine)
            for c, at in enumerate(plan.row_chunks):
                call.forward(c, q[at])
        # Two ranks' keys came back for the second row chunk, the activation did not.
        back = mine.bytes_back
        assert activation.get().sum() == 8
        return back, mine.bytes_back - back

    for found in groups.run(run, prepared(case, given, groups).ranks, *given[:3]):
        assert found == (2 * 12 * 2 * (8 + 4) * 8, 64)


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
    """A host that counts pending and finished fetches per key chunk."""

    def __init__(self):
        self.inner, self.there, self.most = host(), 0, 0

    def move(self, tensor, *, framed):
        return _Counted(self, self.inner.move(tensor, framed=framed))


class _Counted:
    def __init__(self, owner, moved):
        self.owner, self.inner, self.fetched, self.moved = owner, moved, False, moved.moved

    def fetch(self):
        if not self.fetched:
            self.fetched = True
            self.owner.there += 1
            self.owner.most = max(self.owner.most, self.owner.there)
        self.inner.fetch()

    def release(self):
        self.inner.release()

    def get(self):
        self.fetch()
        tensor, self.fetched = self.inner.get(), False
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

    def call(one, q, k, v):
        one.chunked(k, v, host=host())

    for name in sorted({*algorithms()} - {*ABLE, "auto", "hybrid", "ulysses"}):
        plan = prepared(case._replace(algorithm=name), given, groups)
        words = f"algorithm {name} sends more than keys in forward; use one of burst"
        assert f"2 row chunks (no keys in host memory: {words}" in plan.describe()
        with pytest.raises(ValueError, match=f"host: {words}"):
            groups.run(call, plan.ranks, *given[:3])
        with pytest.raises(ValueError, match=f"host: {words}"):
            plan.ranks[0].traffic(host=True)
    plan = prepared(case._replace(chunks=1), given, groups)
    with pytest.raises(
        ValueError, match="host: a single row chunk receives its keys once; use seq"
    ):
        groups.run(call, plan.ranks, *given[:3])


def test_ranks_that_differ_get_an_error():
    """One rank has host memory and the other has none, so their messages have different calls."""
    case = Case(grid=(1, 2, 1), algorithm="ring", chunks=2, mask="full")
    groups, given = rows.groups_of(case), rows.shards(case)

    def call(one, q, k, v, memory):
        mine = one.chunked(k, v, host=memory)
        for c, at in enumerate(one.row_chunks):
            mine.forward(c, q[at])

    with pytest.raises((RuntimeError, ValueError), match="another label or sink"):
        groups.run(call, prepared(case, given, groups).ranks, *given[:3], [host(), None])


def test_what_is_hidden_from_all_does_not_rest_there():
    case = Case(grid=(1, 2, 1), algorithm="burst", chunks=2, layout="contiguous")
    groups, given, hosts = rows.groups_of(case), rows.shards(case), []
    choices = case.choices() | {"mask": masks.Documents([0, 12, 24])}
    plan = in_process.prepare(*given[:3], groups=groups, needs_grad=(True,) * 3, **choices)

    def run(plan, *shard):
        hosts.append(mine := host())
        rows.chunk_by_chunk(plan, *shard, None, False, host=mine)

    groups.run(run, plan.ranks, *given)
    assert [each.bytes_out for each in hosts] == [0, 0]

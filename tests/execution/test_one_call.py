"""`prefetch` computes once for the keys of all other ranks.

Results equal the oracle; calls and tiles are counted.
"""

import gc
import random

import numpy as np
import oracle
import pytest
import torch
from pieces import Pieces

import megatron_burst as mb
from megatron_burst.autotune.prepared import PreparedSchedule
from megatron_burst.execution import joined
from megatron_burst.execution.ring import Backward, Forward
from megatron_burst.plugins.testing import in_process
from megatron_burst.schedule.dry_run import held_bytes

S = 96
SHAPES = (4, 2, 1, 6, 6), (4, 4, 2, 5, 3), (6, 1, 2, 4, 8), (2, 1, 1, 8, 8)  # h, k, b, d, w
GRIDS = [(1, 1, 1), (1, 2, 1), (1, 3, 1), (2, 4, 1), (4, 2, 2), (2, 2, 1)]  # the last share heads


@pytest.fixture
def calls(monkeypatch):
    """Return (pass, rank of the queries, rows of keys) of each kernel call."""
    found = []
    for of in (Forward, Backward):

        def pair(self, call, queries, keys, sums, of=of, pair=of.pair):
            found.append((of.__name__, call.pair.query, len(keys[0])))
            pair(self, call, queries, keys, sums)

        monkeypatch.setattr(of, "pair", pair)
    return found


def packed(rng):
    """Return the starts of documents, and bool [S, S]: causal within each."""
    bounds = [0, *sorted(rng.sample(range(1, S), rng.choice([1, 3, 9]))), S]
    document = np.searchsorted(bounds, np.arange(S), side="right")
    seen = (document[:, None] == document) & np.tri(S, dtype=bool)
    return bounds, torch.from_numpy(seen)


@pytest.mark.parametrize("case", range(12))
def test_equal_to_the_oracle_in_two_calls(calls, case):
    rng = random.Random(case)
    inter, intra, ulysses = GRIDS[case % len(GRIDS)]
    heads, kv_heads, batch, width, value_width = SHAPES[case % len(SHAPES)]
    bounds, seen = packed(rng)
    mask = mb.masks.Documents(bounds) & mb.masks.Causal()
    if case % 3 == 2:
        seen[rng.sample(range(S), 30)] = False  # rows that see nothing
        mask = mb.masks.Dense(seen.clone())
    groups = in_process.groups(inter=inter, intra=intra, ulysses=ulysses)
    name = ("balanced", "zigzag", "balanced", "striped", "contiguous")[case % 5]
    more = {"cu_seqlens": bounds} if name == "balanced" else {}
    layout = mb.layout.make(name, cp_size=groups.size, **more)
    make = torch.Generator().manual_seed(case)
    sizes = (heads, width), (kv_heads, width), (kv_heads, value_width), (heads, value_width)
    q, k, v, dout = (torch.randn(S, batch, *size, generator=make).double() for size in sizes)
    sink = torch.linspace(-1, 1, heads).double() if case % 2 else None
    cut = [[mb.shard(x, layout, rank).requires_grad_() for rank in range(groups.size)]
           for x in (q, k, v)]  # fmt: skip
    outs = in_process.attention(*cut, groups=groups, layout=layout, mask=mask, algorithm="prefetch",
                        side="kv", sink=sink, kernel=rng.choice(["aten", "reference"]))  # fmt: skip
    torch.autograd.backward(outs, [mb.shard(dout, layout, rank) for rank in range(groups.size)])
    out, _, *grads = oracle.attention(q, k, v, dout, seen, sink=sink)
    found = outs, *([x.grad for x in leaves] for leaves in cut)
    for mine, right in zip(found, (out, *grads), strict=True):
        assert oracle.worst(mb.unshard(mine, layout), right) < 1e-10
    for of in ("Forward", "Backward"):
        each = [rank for name, rank, _ in calls if name == of]
        assert max(each.count(rank) for rank in each) <= 2 * ulysses  # rings, of two calls
    assert groups.size == 1 or len(calls) > 2 * groups.size or bounds == [0, S]


def test_keys_lie_in_the_order_of_their_positions():
    """Each rank has a third of both documents.

    The last rank sees two chunks, which make one tile per document; in chunk order they would make
    two.
    """
    thirds = [[(4 * rank, 4 * rank + 4), (12 + 4 * rank, 16 + 4 * rank)] for rank in range(3)]
    groups, mask = in_process.groups(intra=3), mb.masks.Documents([0, 12, 24])
    q = [torch.zeros(8, 1, 2, 4) for _ in range(3)]
    plan = in_process.prepare(q, q, q, groups=groups, layout=Pieces(thirds), algorithm="prefetch",
                      mask=mask & mb.masks.Causal(), kernel="aten")  # fmt: skip
    for rank, tiles in zip(plan.ranks, (None, 2, 2), strict=True):
        calls = [call for step in rank.rank_plan.forward.steps for call in step.calls]
        others = [
            len(call.work)
            for call in calls
            if call.parts or call.pair.key != rank.rank_plan.ring.rank
        ]
        assert others == ([] if tiles is None else [tiles])


def test_keys_that_rest_on_the_host_come_back_one_chunk_at_a_time():
    groups = in_process.groups(intra=4)
    q = [torch.zeros(16, 1, 2, 4) for _ in range(4)]
    plan = in_process.prepare(q, q, q, groups=groups, algorithm="prefetch", sequence_chunks=2)
    passes = [chunk.host_forward for rank in plan.ranks for chunk in rank.rank_plan.chunks]
    assert not any(call.parts for each in passes for step in each.steps for call in step.calls)


def test_the_simulator_charges_the_keys_that_a_call_copies():
    """With two levels, a rank may hold rows that others need, in one chunk with rows that it needs.

    They are copied too; own keys are not. Counted in the plans of random packs.
    """
    rng, own = random.Random(0), 0
    for inter, intra in [(1, 4), (2, 2), (2, 3), (3, 2)]:
        bounds, _ = packed(rng)
        groups, mask = in_process.groups(inter=inter, intra=intra), mb.masks.Documents(bounds)
        q = [torch.zeros(S // groups.size, 1, 2, 4, requires_grad=True) for _ in groups.ranks]
        plan = in_process.prepare(q, q, q, groups=groups, algorithm="prefetch", side="kv",
                          layout=rng.choice(["zigzag", "contiguous", "striped"]),
                          mask=mask & mb.masks.Causal(), kernel="aten")  # fmt: skip
        for rank, of in enumerate(plan.ranks):
            for run, schedule in zip(
                (of.rank_plan.forward, of.rank_plan.backward), of.schedules, strict=True
            ):
                calls = [call for step in run.steps for call in step.calls]
                parts = [part for call in calls for part in call.parts]
                own += sum(part.keys.owner == rank for part in parts)
                found, pairs = PreparedSchedule(schedule), schedule.tables.pairs
                copied = found.added[2][pairs.rank == rank]
                assert copied.sum() == sum(part.rows for part in parts)
                of_rank = found.calls[1][pairs.rank == rank]
                assert len(set(of_rank)) == len(calls)
    assert own == 0


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float32])
def test_a_joined_call_holds_its_keys_once_and_its_gradients_once(monkeypatch, wire):
    """The last rank sees all keys, the others none.

    While its kernel runs, the copies have replaced the received chunks; measured in bytes of all
    tensors.
    """
    size, rows, heads, width = 4, 64, 2, 16
    arrived = 3 * rows * 2 * heads * width * 2  # k and v of three ranks, bf16
    seen = torch.zeros(size * rows, size * rows, dtype=torch.bool)
    seen[-rows:] = True
    groups = in_process.groups(intra=size)
    q, k, v = ([torch.randn(rows, 1, heads, width).bfloat16().requires_grad_() for _ in range(size)]
               for _ in range(3))  # fmt: skip
    plan = in_process.prepare(
        q,
        k,
        v,
        groups=groups,
        algorithm="prefetch",
        side="kv",
        layout="contiguous",
        mask=mb.masks.Dense(seen),
        grad_wire_dtype=wire,
        kernel="reference",
    )
    there, compute = {}, joined.compute

    def tensors():
        dense = (
            x for x in gc.get_objects()
            if type(x) is torch.Tensor and x.layout is torch.strided and x.device.type == "cpu"
        )  # fmt: skip
        kept = (x.untyped_storage() for x in dense)
        return sum({each.data_ptr(): each.nbytes() for each in kept}.values())

    def computing(call, ring):
        rooms = sum(ring.chunks[part.keys].room.nbytes for part in call.parts)
        there["before"] = tensors() - rooms
        compute(call, ring)

    monkeypatch.setattr(joined, "compute", computing)
    for of in (Forward, Backward):

        def pair(self, call, queries, keys, sums, of=of, pair=of.pair):
            if call.parts:
                there[of] = tensors() - there["before"]
            pair(self, call, queries, keys, sums)

        monkeypatch.setattr(of, "pair", pair)
    sum(out.float().sum() for out in in_process.attention(q, k, v, plan=plan)).backward()
    assert there[Forward] == arrived
    own = plan.ranks[-1].rank_plan.backward.totals["dquery", 3].size * heads * width * 4
    # in fp32; the queries' lie in a message with an envelope
    assert arrived + 2 * arrived + own <= there[Backward] <= 3 * arrived + own + 4096
    assert held_bytes(plan.ranks[-1].schedules[0], size - 1) == 2 * arrived
    # In bf16 the last of three gradients is an fp32 sum before it becomes a message.
    leaving = 2 * (arrived // 3) + 2 * (arrived // 3) if wire == torch.bfloat16 else 2 * arrived
    assert plan.ranks[-1].held_bytes == 2 * arrived + leaving

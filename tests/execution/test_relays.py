"""A relay stream: `prefetch` passes rows on while kernels run.

Results equal the oracle in whatever order a device runs the two streams; the order of messages
obeys NCCL's rules; buffers of one stream are not used by the other.
"""

import random
import weakref
from collections import Counter

import numpy as np
import oracle
import pytest
import torch
from nccl_rules import COMMUNICATORS, Fork, Join, Post, Rules, Wait, record
from nccl_rules import faults as nccl_faults
from relay_stream import EARLY, LATE, relay_stream

import megatron_burst as mb
from megatron_burst.execution.buffers import Buffers, ResultAccumulator
from megatron_burst.execution.rank_plan import Step
from megatron_burst.execution.ring import Ring
from megatron_burst.planning import build
from megatron_burst.plugins.testing import in_process

S = 96
GRIDS = [(2, 4, 1), (3, 2, 1), (4, 2, 2), (6, 1, 1), (1, 4, 1), (2, 6, 2)]  # the last share heads
RULES = [Rules(connections, queue, waits) for connections in (False, True)
         for queue in (False, True) for waits in (False, True)]  # fmt: skip


class Case:
    """A random pack in a random layout, and its gradients by hand."""

    def __init__(self, seed, grid=None, **options):
        rng = random.Random(seed)
        self.groups = in_process.groups(**dict(
            zip(("inter", "intra", "ulysses"), grid or GRIDS[seed % len(GRIDS)], strict=True)
        ))  # fmt: skip
        bounds = [0, *sorted(rng.sample(range(1, S), rng.choice([1, 2, 5]))), S]
        document = np.searchsorted(bounds, np.arange(S), side="right")
        self.seen = torch.from_numpy((document[:, None] == document) & np.tri(S, dtype=bool))
        name = rng.choice(["contiguous", "zigzag", "striped"])
        self.layout = mb.layout.make(name, cp_size=self.groups.size)
        self.options = {
            "layout": self.layout, "mask": mb.masks.Documents(bounds) & mb.masks.Causal(),
            "algorithm": "prefetch", "kernel": "reference", "side": rng.choice(["kv", "query"]),
            "head_chunks": rng.choice([1, 1, 2]),
        } | options  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        self.inputs = [
            torch.randn(S, 1, heads, 3, generator=generator, dtype=torch.float64)
            for heads in (4, 4, 4, 4)
        ]

    def error(self):
        """The largest error of out, dq, dk and dv of all ranks."""
        *qkv, douts = (
            [mb.shard(x, self.layout, rank) for rank in range(self.groups.size)]
            for x in self.inputs
        )
        leaves = [x.requires_grad_() for xs in qkv for x in xs]
        outs = in_process.attention(*qkv, groups=self.groups, **self.options)
        grads = torch.autograd.grad(outs, leaves, douts)
        out, _, *of_inputs = oracle.attention(*self.inputs, self.seen)
        right = [mb.shard(x, self.layout, rank) for x in (out, *of_inputs)
                 for rank in range(self.groups.size)]  # fmt: skip
        return max(oracle.worst(x, y) for x, y in zip([*outs, *grads], right, strict=True))


@pytest.mark.parametrize("order", [EARLY, LATE])
@pytest.mark.parametrize("seed", range(12))
def test_results_do_not_depend_on_the_order_of_the_streams(seed, order):
    with relay_stream(order):
        assert Case(seed).error() < 1e-10


@pytest.mark.parametrize("name", COMMUNICATORS)
@pytest.mark.parametrize("seed", range(6))
def test_hops_obey_the_rules_of_nccl(seed, name):
    with relay_stream(EARLY):
        case = Case(seed)
        traces = record(case.groups)
        assert case.error() < 1e-10
    communicator = COMMUNICATORS[name](case.groups.topology)
    assert nccl_faults(traces, communicator, tuple(RULES)) == []
    relayed = [event for trace in traces for event in trace
               if isinstance(event, Post) and event.stream == "relay"]  # fmt: skip
    passed_on = [message for event in relayed for message in event.sent
                 if message.received_by is not None]  # fmt: skip
    two_levels = min(case.groups.topology.intra_size, case.groups.topology.inter_size) > 1
    assert bool(passed_on) == two_levels
    rings = [event for trace in traces for event in trace
             if isinstance(event, Post) and event.channel.ring != "ulysses"]  # fmt: skip
    assert relayed == (rings if two_levels else [])


def test_a_send_before_its_receive_has_landed_is_seen():
    """The relay stream forgets to wait before a boundary of the chain, on one rank."""
    with relay_stream(EARLY):
        case = Case(0, (2, 4, 1), side="kv", head_chunks=1)
        traces = record(case.groups)
        case.error()
    communicator = COMMUNICATORS["all apart"](case.groups.topology)
    assert nccl_faults(traces, communicator) == []
    gate = next(
        rank
        for rank, trace in enumerate(traces)
        for event in trace
        if isinstance(event, Post) and any(m.received_by is not None for m in event.sent)
    )
    late = [event._replace(stream="computing") if isinstance(event, Wait) else event
            for event in traces[gate]]  # fmt: skip
    found = nccl_faults([late if rank == gate else trace for rank, trace in enumerate(traces)],
                        communicator)  # fmt: skip
    assert found
    assert all(f"rank {gate} sends rows that have not landed" in one for one in found)


def test_kernels_do_not_delay_relays():
    """A rank launches no kernel before its relays, and waits for them after its own pair."""
    with relay_stream(EARLY):
        case = Case(0, (2, 4, 1), side="kv", head_chunks=1)
        traces, events = record(case.groups), Counter()
        pair = Ring._relay

        def relay(self, *chain):
            events[self.me, self.rank_pass.name] += 1
            pair(self, *chain)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Ring, "_relay", relay)
            assert case.error() < 1e-10
    for rank, trace in enumerate(traces):
        kinds = [type(event) for event in trace]
        assert kinds.count(Fork) == 3  # copies of both passes, gradients
        assert kinds.count(Join) >= 3
        assert all(event.stream == "relay" for event in trace if isinstance(event, (Post, Wait)))
        assert sum(n for (me, _), n in events.items() if me == rank) == 3


@pytest.mark.parametrize("grid", GRIDS)
def test_own_pairs_are_first_and_early_chunks_have_a_call(grid):
    """Calls of forward: own keys, keys that arrive first, all others. In backward own keys last."""
    with relay_stream(EARLY):
        case = Case(3, grid, side="kv", head_chunks=1, layout="striped")
        q = [torch.zeros(S // case.groups.size, 1, 4, 3, requires_grad=True)
             for _ in case.groups.ranks]  # fmt: skip
        plan = in_process.prepare(q, q, q, groups=case.groups, **case.options)
    two_levels, most = min(case.groups.topology.intra_size, case.groups.topology.inter_size) > 1, 0
    for of in plan.ranks:
        me = of.rank_plan.ring.rank
        for run, at in ((of.rank_plan.forward, 0), (of.rank_plan.backward, -1)):
            calls = [(step.index, call) for step in run.steps for call in step.calls]
            assert calls[at][1].keys.owner == me
            assert not calls[at][1].parts
            assert len(calls) <= 3
            assert at or calls[0][0] == 0
            others = [index for index, call in calls if call is not calls[at][1]]
            assert others[:1] in ([1], [])
            most = max(most, len(calls))
            chains = [bool(step.relays) for step in run.steps].count(True)
            assert chains == (1 - at) * two_levels
            assert ("relays on a stream" in of.describe()) == two_levels
    assert most == 2 + two_levels


@pytest.mark.parametrize("seed", [0, 1])
def test_the_streams_share_no_buffers(seed, monkeypatch):
    """The computing stream takes no buffer that a chain has taken or freed, until it has waited for
    the chain; and the chain adds nothing to sums of own rows."""
    inside, of_chain, owner, freed = [], {}, {}, Counter()
    real_relay, real_take, real_give = Ring._relay, Buffers.take, Buffers.give
    real_receive, real_finish = ResultAccumulator.receive, Ring._finish

    def relay(self, *chain):
        owner[id(self.partials)] = self.me
        sums = [
            weakref.ref(x)
            for total in self.partials._totals.values()
            for x in (*total.message.tensors, *(total.write.args[0] if total.write else ()))
        ]
        inside.append(self)
        real_relay(self, *chain)
        inside.remove(self)
        freed.update(x() is None for x in sums)

    def of(buffers):
        return any(ring.buffers is buffers for ring in inside)

    def take(self, kind, rows):
        message = real_take(self, kind, rows)
        key = id(self), message.room.data_ptr()
        assert of(self) or key not in of_chain, "taken beside the relay stream"
        if of(self):
            of_chain[key] = message  # keeps the memory
        return message

    def give(self, kind, message):
        if of(self) and message.room is not None:
            of_chain[id(self), message.room.data_ptr()] = message
        real_give(self, kind, message)

    def receive(self, target, message):
        if any(ring.partials is self for ring in inside):
            assert target.total.owner != owner[id(self)], "sums of own rows on the relay stream"
        real_receive(self, target, message)

    def finish(self, boundary, relayed=False):
        if boundary == self.steps[-1].index and not relayed:
            for key in [key for key in of_chain if key[0] == id(self.buffers)]:
                del of_chain[key]
        real_finish(self, boundary, relayed)

    monkeypatch.setattr(Ring, "_relay", relay)
    monkeypatch.setattr(Ring, "_finish", finish)
    monkeypatch.setattr(Buffers, "take", take)
    monkeypatch.setattr(Buffers, "give", give)
    monkeypatch.setattr(ResultAccumulator, "receive", receive)
    with relay_stream(EARLY):
        assert Case(seed, (2, 4, 1), head_chunks=1).error() < 1e-10
    assert owner
    assert freed[False]
    assert not freed[True], "sums are freed that the relay stream may still read"


def test_chains_need_steps_that_are_numbered_from_zero():
    steps = [Step(index, (), (), ()) for index in range(3)]
    assert len(build._relayed(steps, {0: slice(0, None)})[0].relays) == 3
    with pytest.raises(AssertionError, match="not numbered from 0"):
        build._relayed(steps[1:], {1: slice(1, None)})


def test_without_relays_there_is_no_relay_stream(monkeypatch):
    """On one node every transfer has the same boundary, so a stream would only cost memory."""
    started = Counter()
    for grid in ((1, 4, 1), (2, 4, 1)):
        monkeypatch.setattr(EARLY, "start", lambda _, work, at=grid: (started.update([at]), work()))
        with relay_stream(EARLY):
            assert Case(3, grid).error() < 1e-10
    assert list(started) == [(2, 4, 1)]


def test_an_error_of_a_kernel_ends_the_chains_of_all_rings(monkeypatch):
    class Failing(EARLY):
        ended = 0

        def abandon(self):
            Failing.ended += 1

    def broken(*_):
        raise RuntimeError("a kernel failed")

    monkeypatch.setattr("megatron_burst.execution.ring.Backward.pair", broken)
    with relay_stream(Failing), pytest.raises(RuntimeError, match="a kernel failed"):
        Case(3, (2, 4, 1), head_chunks=1).error()
    assert Failing.ended

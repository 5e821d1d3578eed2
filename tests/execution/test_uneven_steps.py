"""Other ranks wait only for data of a slow rank: counted, not timed.

The slow rank begins its first pair of a pass after all others have computed all of theirs. If a hop
were posted only after that pair, the ranks would wait for each other.
"""

from collections import Counter

import cases
import oracle
import pytest
import torch
import torch.distributed as dist
from nccl_rules import COMMUNICATORS, record
from nccl_rules import faults as nccl_faults

import megatron_burst as mb
from megatron_burst.execution.ring import Backward, Forward
from megatron_burst.plugins.testing import in_process
from megatron_burst.plugins.testing.local import LocalEndpoint
from megatron_burst.schedule.demand import Demand

SIZE, ROWS = 4, 8
PACK = [0, 10, 21, 32]  # documents; each is on three ranks or more
SLOW = 1  # ranks 0 and 2 need its keys: 0 at its third step
COMPUTES = {"forward": Forward, "backward": Backward}


def pack(seed=0):
    """Return (q, k, v, dout), visible keys of each row, and the rows of every rank, by hand."""
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(SIZE * ROWS, 1, 2, 4, generator=generator).double() for _ in range(4)]
    document = torch.bucketize(torch.arange(SIZE * ROWS), torch.tensor(PACK[1:]), right=True)
    seen = (document[:, None] == document).tril()
    return inputs, seen, oracle.permutation("zigzag", SIZE, SIZE * ROWS)


def asked(algorithm):
    mask = mb.masks.Documents(PACK) & mb.masks.Causal()
    return {"mask": mask, "layout": "zigzag", "algorithm": algorithm, "side": "kv",
            "kernel": "reference"}  # fmt: skip


def all_ranks(groups, algorithm):
    """Return the largest error of (out, dq, dk, dv) of all ranks."""
    inputs, seen, rows = pack()
    *qkv, douts = [[x[mine].clone() for mine in rows] for x in inputs]
    leaves = [x.requires_grad_() for xs in qkv for x in xs]
    outs = in_process.attention(*qkv, groups=groups, **asked(algorithm))
    grads = torch.autograd.grad(outs, leaves, douts)
    out, _, *of_inputs = oracle.attention(*inputs, seen)
    right = [x[mine] for x in (out, *of_inputs) for mine in rows]
    return max(oracle.worst(x, y) for x, y in zip([*outs, *grads], right, strict=True))


def on_local_ranks(algorithm, monkeypatch, gate=lambda switch, rank, done: None):
    """Return the largest errors, and the pairs of each pass and rank.

    `gate` is called before a pair with the number of finished pairs of each rank.
    """
    groups = in_process.groups(intra=SIZE)
    counted = {name: Counter() for name in COMPUTES}
    with monkeypatch.context() as patch:
        for name, cls in COMPUTES.items():

            def pair(self, call, *rest, real=cls.pair, done=counted[name]):
                rank = call.queries.owner
                gate(groups.ranks[0].ring.switch, rank, done)
                real(self, call, *rest)
                done[rank] += 1

            patch.setattr(cls, "pair", pair)
        return all_ranks(groups, algorithm), counted


def held_up(pairs, at=0):
    """The slow rank waits before its pair number `at` for all `pairs` of the others."""

    def gate(switch, rank, done):
        if rank == SLOW and done[rank] == at:
            switch.wait(
                lambda: all(done[r] == n for r, n in pairs.items() if r != SLOW),
                f"of {dict(pairs)} pairs there are {dict(done)}",
            )

    return gate


@pytest.mark.parametrize("algorithm", ["burst", "ring", "multicast", "all_gather"])
def test_nobody_waits_for_the_pairs_of_a_slow_rank(algorithm, monkeypatch):
    error, pairs = on_local_ranks(algorithm, monkeypatch)
    assert error < cases.TOLERANCE
    assert sum(pairs["forward"].values()) == sum(pairs["backward"].values()) == 12
    for at in range(pairs["forward"][SLOW]):
        error, _ = on_local_ranks(algorithm, monkeypatch, held_up(pairs["forward"], at))
        assert error < cases.TOLERANCE


@pytest.mark.parametrize("algorithm", ["burst", "multicast"])
def test_hops_posted_a_step_ahead_made_others_wait(algorithm, monkeypatch):
    """The schedule that the test above detects."""
    _, pairs = on_local_ranks(algorithm, monkeypatch)
    monkeypatch.setattr(Demand, "ahead", lambda self, *given: given[-1])
    gates = [held_up(pairs["forward"], at) for at in range(pairs["forward"][SLOW])]
    waits = []
    for gate in gates:
        try:
            on_local_ranks(algorithm, monkeypatch, gate)
        except RuntimeError as error:
            waits.append(str(error))
    assert waits
    assert all("deadlock" in one for one in waits)


@pytest.mark.parametrize("step", range(SIZE))
def test_a_ring_waits_for_the_next_hop_alone(step, monkeypatch):
    """Whole chunks are forwarded: a rank must wait for a chunk before it forwards it.

    It cannot do that while it computes. Rank 1, delayed in its pair of a step, has posted the hop
    of that step before. So rank 0, which it does not wait for, computes one step more and stops; so
    does rank 2. Rank 3, for which rank 2 has posted one more, computes another.
    """
    done, full = Counter(), {"mask": mb.masks.Full(), "layout": "contiguous", "algorithm": "ring"}
    real, groups = Forward.pair, in_process.groups(intra=SIZE)

    def pair(self, call, *rest):
        rank = call.queries.owner
        if rank == SLOW and done[rank] == step:
            groups.ranks[0].ring.switch.wait(lambda: False, "for ever")
        real(self, call, *rest)
        done[rank] += 1

    monkeypatch.setattr(Forward, "pair", pair)
    x = [torch.randn(2, 1, 2, 4).double() for _ in range(SIZE)]
    with pytest.raises(RuntimeError, match="deadlock"):
        in_process.attention(x, x, x, groups=groups, kernel="reference", **full)
    ends = [step + 2, step, step + 2, step + 3]
    assert [done[rank] for rank in range(SIZE)] == [min(SIZE, end) for end in ends]


# --- on gloo ranks ------------------------------------------------------------------------------


def slow_on_gloo(algorithm, key):
    """Return the errors of (out, dq, dk, dv) of this rank.

    The slow rank waits at its first pair of forward until all pairs of the others are computed.
    """
    groups = mb.Groups.flat(dist.group.WORLD)
    inputs, seen, rows = pack()
    mine, store = rows[groups.rank], dist.distributed_c10d._get_default_store()
    *leaves, dout = [x[mine].clone() for x in inputs]
    leaves = [x.requires_grad_() for x in leaves]
    document = torch.bucketize(torch.arange(SIZE * ROWS), torch.tensor(PACK[1:]), right=True)
    pairs = sum(
        int((document[rows[rank]][:, None] == document[other]).logical_and(
            torch.as_tensor(rows[rank])[:, None] >= torch.as_tensor(other)).any())
        for rank in range(SIZE) if rank != SLOW for other in rows
    )  # fmt: skip
    real, first = Forward.pair, []

    def pair(self, call, *rest):
        if groups.rank == SLOW and not first:
            first.append(True)
            store.wait([f"{key}/all"])
        real(self, call, *rest)
        if groups.rank != SLOW and store.add(f"{key}/pairs", 1) == pairs:
            store.set(f"{key}/all", b"")

    Forward.pair = pair
    try:
        out = mb.attention(*leaves, groups=groups, **asked(algorithm))
    finally:
        Forward.pair = real
    grads = torch.autograd.grad(out, leaves, dout)
    right, _, *of_inputs = oracle.attention(*inputs, seen)
    return max(
        oracle.worst(x, y[mine]) for x, y in zip((out, *grads), (right, *of_inputs), strict=True)
    )


@pytest.mark.parametrize("algorithm", ["burst", "multicast"])
def test_on_gloo_a_slow_rank_is_waited_for_by_nobody(ranks, algorithm):
    errors = ranks(SIZE).run(slow_on_gloo, algorithm, f"uneven {algorithm}")
    assert max(errors) < cases.TOLERANCE


# --- order, and planted faults ------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [{"intra": 4}, {"inter": 2, "intra": 2}], ids=str)
@pytest.mark.parametrize("algorithm", ["burst", "multicast"])
@pytest.mark.parametrize("name", COMMUNICATORS)
def test_nccl_takes_hops_in_this_order(algorithm, sizes, name):
    groups = in_process.groups(**sizes)
    traces = record(groups)
    assert all_ranks(groups, algorithm) < cases.TOLERANCE
    assert nccl_faults(traces, COMMUNICATORS[name](groups.topology)) == []


def shifted(accumulated, by):
    """Return `as_tables` with hops of forwarded copies, or of gradients, posted earlier."""
    real = Demand.as_tables

    def as_tables(self, *given, **more):
        made = real(self, *given, **more)
        moved = made.transfers
        passed = moved.accumulated if accumulated else moved.src != moved.owner
        assert passed.any()
        post = moved.post - by * passed
        return made._replace(transfers=moved._replace(post=post.clip(0)))

    return as_tables


@pytest.mark.parametrize(("accumulated", "backward"), [(False, False), (True, True)])
def test_a_hop_posted_too_early_is_a_wrong_number_or_an_error(accumulated, backward, monkeypatch):
    """A copy is forwarded before it was received; a gradient before its last contribution."""
    groups = in_process.groups(inter=2, intra=2)
    real = Demand.as_tables
    planted = shifted(accumulated, by=1)
    monkeypatch.setattr(
        Demand, "as_tables",
        lambda self, *a, **m: (planted if self.gradients == backward else real)(self, *a, **m),
    )  # fmt: skip
    try:
        wrong = not all_ranks(groups, "multicast") < cases.TOLERANCE
    except (RuntimeError, KeyError, ValueError) as error:
        wrong = bool(str(error))
    assert wrong


def test_a_buffer_taken_before_it_is_free_is_seen(monkeypatch):
    """A received message overwrites a chunk that the rank still computes with."""
    groups, real = in_process.groups(intra=SIZE), LocalEndpoint.exchange
    last = {}

    def exchange(self, channel, sends, receives, label):
        if self.rank == SLOW and not channel.gradient:
            for at, one in enumerate(receives):
                key = one.message.flat.numel()
                if key in last:
                    receives[at] = one._replace(message=last[key], tensors=last[key].tensors)
                last[key] = one.message
        return real(self, channel, sends, receives, label)

    monkeypatch.setattr(LocalEndpoint, "exchange", exchange)
    assert not all_ranks(groups, "burst") < cases.TOLERANCE

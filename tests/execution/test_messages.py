"""Number of messages without envelopes, as on a GPU: meta tensors in one process.

Both ends must agree on the content of one message, and collectives must give the same results.
"""

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

import megatron_burst as mb
from megatron_burst.comm.packing import NO_CALL, Envelope
from megatron_burst.comm.transport import AllToAll, Channel, ProcessEndpoint
from megatron_burst.execution import function
from megatron_burst.plugins.testing import in_process
from megatron_burst.plugins.testing.local import LocalEndpoint
from megatron_burst.schedule.rings import Schedule

SIZE = 4


def sent(monkeypatch, backward=False, rows=16, **options):
    """Return (gradients?, tensors of a message, number of pieces) -> count."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)  # there is no device
    shapes = (rows, 1, 4, 8), (rows, 1, 2, 8), (rows, 1, 2, 8)
    shards = [[torch.empty(s, device="meta", dtype=torch.bfloat16) for s in shapes]] * SIZE
    groups = in_process.groups(intra=SIZE)
    plan = in_process.prepare(
        *([x] * SIZE for x in shards[0]), groups=groups, needs_grad=(True, True, True),
        kernel="reference", algorithm="ring", side="kv", **options,
    )  # fmt: skip
    jobs, calls = [one.rank_plan for one in plan.ranks], [NO_CALL] * SIZE
    seen, exchange = Counter(), LocalEndpoint.exchange

    def watched(self, channel, sends, receives, label):
        for one in sends:
            pieces = len(one.tensors) if one.flat is None else 1
            assert one.flat is None or one.flat.dtype == torch.uint8
            seen[channel.gradient, len(one.tensors), pieces] += 1
        return exchange(self, channel, sends, receives, label)

    results = groups.run(function.forward, jobs, calls, shards, [None] * SIZE, [None] * SIZE)
    outs, saved = zip(*results, strict=True)
    monkeypatch.setattr(LocalEndpoint, "exchange", watched)
    if backward:
        groups.run(function.backward, jobs, calls, outs, saved, [None] * SIZE)
    else:
        groups.run(function.forward, jobs, calls, shards, [None] * SIZE, [None] * SIZE)
    return dict(seen)


@pytest.mark.parametrize("head_chunks", [1, 2])
def test_only_a_ranks_own_keys_travel_one_by_one(head_chunks, monkeypatch):
    """k and v of every rank make three hops; only the first sends own tensors."""
    hops = {(False, 2, 2): SIZE * head_chunks, (False, 2, 1): 2 * SIZE * head_chunks}
    options = {"layout": "striped", "head_chunks": head_chunks}
    assert sent(monkeypatch, **options) == hops


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_gradients_are_one_message(wire, monkeypatch):
    """dk and dv of every rank return from three other ranks."""
    hops = sent(monkeypatch, backward=True, layout="striped", grad_wire_dtype=wire)
    assert {key: n for key, n in hops.items() if key[0]} == {(True, 2, 1): 3 * SIZE}


# --- ranks that share heads -----------------------------------------------------------------

OPERATIONS = "batch_isend_irecv", "all_to_all_single"


def both_ways(ulysses, placement, heads):
    """Compare a call by messages, as on the CPU, with a call by collectives, as on devices.

    Returns (same bits, same counted bytes, all-to-alls, other operations) of this rank.
    """
    groups = mb.Groups.from_topology(
        dist.group.WORLD, intra=2, ulysses=ulysses, placement=placement
    )
    torch.manual_seed(groups.rank)
    q, k, v = (
        torch.randn(6, 2, n, d, dtype=torch.bfloat16, requires_grad=True)
        for n, d in ((8, 4), (heads, 4), (heads, 6))
    )
    algorithm = "hybrid" if ulysses == 2 else "ulysses"
    done, stock = Counter(), {name: getattr(dist, name) for name in OPERATIONS}

    def attend():
        groups.counters.reset()
        done.clear()
        out = in_process.attention(q, k, v, groups=groups, algorithm=algorithm, kernel="reference")
        results = out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        return results, (groups.counters.intra, groups.counters.inter), dict(done)

    def collectives(self, trade):
        self._collectives(self.channels[trade.channel, "cpu"], trade)

    with pytest.MonkeyPatch.context() as patched:
        for name in OPERATIONS:

            def noted(*given, name=name, **named):
                done[name] += len(given[0]) if name == "batch_isend_irecv" else 1
                return stock[name](*given, **named)

            patched.setattr(dist, name, noted)
        messages, counted, by_messages = attend()
        patched.setattr(ProcessEndpoint, "all_to_all", collectives)
        whole, again, by_collectives = attend()
    same = all(map(torch.equal, messages, whole))
    fewer = by_messages["batch_isend_irecv"] - by_collectives.get("batch_isend_irecv", 0)
    return same, counted == again, by_collectives["all_to_all_single"], fewer


@pytest.mark.parametrize("heads", [1, 2, 4, 8])  # copies of one, copies, equal shares
@pytest.mark.parametrize(
    ("ulysses", "placement"), [(2, "head_first"), (2, "context_first"), (4, "head_first")]
)
def test_a_collective_per_tensor_brings_what_messages_bring(ranks, ulysses, placement, heads):
    """q, k and v, then out; in backward dout, then dq, dk and dv.

    Eight tensors in four exchanges, to and from each other rank.
    """
    expected = True, True, 8, 4 * 2 * (ulysses - 1)
    assert ranks(4).run(both_ways, ulysses, placement, heads) == [expected] * 4


@pytest.mark.parametrize(
    ("device", "order", "collectives"),
    [("meta", [4, 7], 2), ("meta", [7, 4], 0), ("cpu", [4, 7], 0)],
)
def test_a_device_takes_collectives_where_its_group_has_the_order(
    device, order, collectives, monkeypatch
):
    """A collective sends its parts in the order of the process group."""
    made, exchanged = [], []
    finished = SimpleNamespace(wait=lambda: None)

    def all_to_all(target, source, group, async_op):
        made.append((target.shape, source.shape))
        assert async_op
        assert source.is_contiguous()
        return finished

    monkeypatch.setattr(dist, "all_to_all_single", all_to_all)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: order)
    monkeypatch.setattr(
        ProcessEndpoint, "exchange", lambda self, *given: exchanged.append(given) or finished
    )
    channel = Channel("ulysses", False)
    end: Any = ProcessEndpoint(0, [4, 7], {(channel, device): cast("Any", "group")})
    parts = [torch.empty(3, 1, 4, 8, device=device).unflatten(2, (2, 2)).movedim(2, 0)] * 2
    into = [torch.empty(part.shape, device=device) for part in parts]
    end.all_to_all(AllToAll(channel, parts, into, ["intra", "inter"], Envelope(NO_CALL, 0), "test"))
    assert made == [((2, 3, 1, 2, 8),) * 2] * collectives
    assert len(exchanged) == (not collectives)
    assert end.counters.inter == (2 * 3 * 1 * 2 * 8 * 4 if collectives else 0)  # else `exchange`'s


def test_a_second_batch_finds_no_hops_again(monkeypatch):
    """Channels are computed once for all batches of a grid, and equal those of a single batch."""
    rows = torch.zeros(8, 1, 2, 4)

    def plans(groups, cut, side="kv"):
        mask = mb.masks.Documents([0, cut, 32]) & mb.masks.Causal()
        options = {"mask": mask, "algorithm": "multicast", "side": side, "needs_grad": (True,) * 3}
        made = in_process.prepare([rows] * 4, [rows] * 4, [rows] * 4, groups=groups, **options)
        return [(plan.channels, plan.longest_message) for plan in made.ranks]

    groups = in_process.groups(inter=2, intra=2)
    alone = plans(in_process.groups(inter=2, intra=2), 20)
    plans(groups, 5, "query")
    plans(groups, 5)
    monkeypatch.delattr(Schedule, "_typical")
    assert plans(groups, 20) == alone

"""How many messages travel where they bear no envelope, as on a GPU: on meta tensors, in one
process, where both ends must agree on what one message is."""

from collections import Counter

import pytest
import torch

import megatron_burst as mb
from megatron_burst.comm.local import LocalEndpoint
from megatron_burst.comm.packing import NO_CALL
from megatron_burst.execution import function

SIZE = 4


def sent(monkeypatch, backward=False, rows=16, **options):
    """(gradients?, tensors of a message, in how many pieces it travelled) -> how often."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)  # there is no device
    shapes = (rows, 1, 4, 8), (rows, 1, 2, 8), (rows, 1, 2, 8)
    shards = [[torch.empty(s, device="meta", dtype=torch.bfloat16) for s in shapes]] * SIZE
    groups = mb.Groups.in_process(intra=SIZE)
    plan = mb.prepare(
        *([x] * SIZE for x in shards[0]), groups=groups, needs_grad=(True, True, True),
        kernel="reference", algorithm="ring", side="kv", **options,
    )  # fmt: skip
    jobs, calls = [one.job for one in plan.ranks], [NO_CALL] * SIZE
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
    """k and v of every rank go three hops, of which the first is its own."""
    hops = {(False, 2, 2): SIZE * head_chunks, (False, 2, 1): 2 * SIZE * head_chunks}
    options = {"layout": "striped", "head_chunks": head_chunks}
    assert sent(monkeypatch, **options) == hops


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_gradients_are_one_message(wire, monkeypatch):
    """dk and dv of every rank come home from three others."""
    hops = sent(monkeypatch, backward=True, layout="striped", grad_wire_dtype=wire)
    assert {key: n for key, n in hops.items() if key[0]} == {(True, 2, 1): 3 * SIZE}

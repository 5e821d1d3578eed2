"""Exchange of rows between any ranks: places, gradients and cost."""

from typing import NamedTuple

import nccl_rules
import numpy as np
import pytest
import torch

import megatron_burst as mb
from megatron_burst.layout.pieces import chains
from megatron_burst.layout.routes import Route, preceding, relayout
from megatron_burst.plugins.testing import in_process
from megatron_burst.plugins.testing.in_process import exchange_rows

WORLDS = [(1, 1), (1, 2), (3, 1), (2, 2), (2, 4)]


class Copies(NamedTuple):
    """Position -> its place in the result of every rank; -1 if it is not there."""

    layout: mb.layout.Layout
    positions: int
    routes: list[Route]
    expected: list[list[int]]


def relaid(world, seq_len=48):
    before, after = (mb.layout.make(name, cp_size=world) for name in ("zigzag", "contiguous"))
    routes = [relayout(before, after, seq_len, rank) for rank in range(world)]
    return Copies(
        before, seq_len, routes, [after.positions(r, seq_len).tolist() for r in range(world)]
    )


def looking_back(world, seq_len=48, width=6, documents=(0, 4, 5, 30, 48)):
    layout = mb.layout.make("zigzag", cp_size=world)
    found = chains(layout, seq_len, documents)
    expected = []
    for rank in range(world):
        wanted = []
        for piece in found.of(rank):
            start, document = found.table[piece, 4], found.table[piece, 3]
            before = range(start - width + 1, start)
            wanted += [p if p >= documents[document] else -1 for p in before]
        expected.append(wanted)
    routes = [preceding(found, width, rank) for rank in range(world)]
    return Copies(layout, seq_len, routes, expected)


KINDS = {"another layout": relaid, "the rows before each piece": looking_back}


def check(copies, groups):
    """Compare values and gradients of two tensors with a copy of the whole sequence."""
    make = torch.Generator().manual_seed(3)
    wide = torch.randn(copies.positions, 2, 3, generator=make, dtype=torch.float64)
    flat = torch.randn(copies.positions, 2, generator=make)
    ranks = range(groups.size)
    own = [copies.layout.positions(rank, copies.positions) for rank in ranks]
    shards = [[t[p].requires_grad_() for t in (wide, flat)] for p in own]
    results = exchange_rows(shards, copies.routes, groups, 7, "layer")
    weights = [[torch.randn(t.shape, generator=make, dtype=t.dtype) for t in r] for r in results]
    loss = sum(
        (t * w).sum()
        for r, ws in zip(results, weights, strict=True)
        for t, w in zip(r, ws, strict=True)
    )
    grads = torch.autograd.grad(loss, [t for shard in shards for t in shard])
    for index, whole in enumerate((wide, flat)):
        total = torch.zeros_like(whole, dtype=torch.float64)
        for rank in ranks:
            for row, position in enumerate(copies.expected[rank]):
                wanted = whole[position] if position >= 0 else torch.zeros_like(whole[0])
                assert torch.equal(results[rank][index][row], wanted)
                if position >= 0:
                    total[position] += weights[rank][index][row]
        for rank in ranks:
            torch.testing.assert_close(
                grads[2 * rank + index].double(), total[own[rank]], atol=1e-6, rtol=0
            )


@pytest.mark.parametrize(("inter", "intra"), WORLDS)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_their_gradients(kind, inter, intra):
    groups = in_process.groups(inter=inter, intra=intra)
    traces = nccl_rules.record(groups)
    check(KINDS[kind](groups.size), groups)
    for communicator in nccl_rules.COMMUNICATORS.values():
        assert not nccl_rules.faults(traces, communicator(groups.topology))


def test_bytes_are_those_of_the_rows_that_leave():
    groups = in_process.groups(inter=2, intra=2)
    copies = relaid(4)
    check(copies, groups)
    row = 2 * 3 * 8 + 2 * 4
    turned = [
        relayout(mb.layout.make("contiguous", cp_size=4), copies.layout, 48, r) for r in range(4)
    ]
    for rank, group in enumerate(groups.ranks):
        there, home = copies.routes[rank].leaving(rank, 2), turned[rank].leaving(rank, 2)
        assert group.counters.intra == row * (there[0] + home[0])
        assert group.counters.inter == row * (there[1] + home[1])
        assert sum(there) > 0


def test_it_can_be_differentiated_twice():
    groups = in_process.groups(intra=2)
    copies = looking_back(2)
    shards = [[torch.randn(24, dtype=torch.float64, requires_grad=True)] for _ in range(2)]

    def loss(*flat):
        moved = exchange_rows([[t] for t in flat], copies.routes, groups)
        return sum((t**3).sum() for (t,) in moved)

    assert torch.autograd.gradgradcheck(loss, [t for (t,) in shards])


def test_gradients_of_copies_add_up_in_float32():
    """A sum in bfloat16 would lose the ones next to 256."""
    groups = in_process.groups(intra=3)
    none, first = np.zeros(0, dtype=int), np.zeros(1, dtype=int)
    routes = [Route((first,) * 3, (first, none, none), 1)]
    routes += [Route((none,) * 3, (first, none, none), 1)] * 2
    shards = [[torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)] for _ in range(3)]
    results = exchange_rows(shards, routes, groups)
    sum(weight * t.sum() for weight, (t,) in zip((256, 1, 1), results, strict=True)).backward()
    assert [shard[0].grad.item() for shard in shards] == [258, 0, 0]

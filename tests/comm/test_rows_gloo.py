"""Exchange of rows between any ranks, on gloo ranks."""

import pytest
import torch
import torch.distributed as dist
from test_rows import KINDS, relaid

import megatron_burst as mb
from megatron_burst.comm.rows import GRID, exchange_rows, longest


def on_gloo(kind, ulysses):
    """Return the result of this rank of two, its gradient and its counters."""
    groups = mb.Groups.flat(dist.group.WORLD, ulysses=ulysses)
    copies = KINDS[kind](groups.size)
    rank = groups.rank
    own = copies.layout.positions(rank, copies.positions)
    rows = torch.tensor(own, dtype=torch.float32)[:, None].expand(-1, 3).requires_grad_()
    groups.connect([GRID], rows.device)
    groups.expect(longest(copies.positions, [rows]))
    (result,) = exchange_rows([rows], copies.routes[rank], groups)
    wanted = torch.tensor([max(p, 0) for p in copies.expected[rank]], dtype=torch.float32)
    assert torch.equal(result[:, 1], wanted)
    result.sum().backward()
    counted = torch.tensor([sum(p == x for e in copies.expected for x in e) for p in own])
    return torch.equal(rows.grad[:, 0], counted.float()), groups.counters.intra


@pytest.mark.parametrize("ulysses", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_gloo_ranks(kind, ulysses, ranks):
    for equal, sent in ranks(2).run(on_gloo, kind, ulysses):
        assert equal
        assert sent > 0


def out_of_step():
    groups = mb.Groups.flat(dist.group.WORLD)
    copies = relaid(2)
    rows = torch.zeros(24, 3)
    groups.connect([GRID], rows.device)
    groups.expect(longest(48, [rows]))
    try:
        exchange_rows([rows], copies.routes[groups.rank], groups, identity=groups.rank)
    except RuntimeError as error:
        return str(error)
    return None


def test_ranks_out_of_step_get_an_error(ranks):
    for words in ranks(2).run(out_of_step):
        assert "another plan" in words

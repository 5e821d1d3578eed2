"""Random calls of every mask, layout, algorithm, head group, sink and softcap.

Seeds draw whole calls and their order. `fuzz.judge` compares them with the dense oracle, and sent
bytes with the plan. Sinks, which seeds draw too rarely, have their own tests.
"""

import cases
import oracle
import pytest
import torch
import torch.distributed as dist
from fuzz import attention

import megatron_burst as mb
from megatron_burst import masks
from megatron_burst.plugins.testing import in_process
from megatron_burst.schedule.algorithms import ALGORITHMS


def test_random_calls_in_one_process():
    """A short search with fixed seeds; `make fuzz` searches longer."""
    tally = attention.search(range(40))
    assert not tally.failures, tally
    assert tally.tried == 40


@pytest.fixture
def undefined_is_nan():
    """Fill new memory with NaN, so that reading undefined content is an error."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.usefixtures("undefined_is_nan")
def test_every_algorithm_equals_dense_attention(algorithm):
    """Every entry of the table of algorithms, a new one too, on grids of 1 to 8 ranks."""
    layouts = ("zigzag", "striped", "contiguous")
    for number, (nodes, per_node) in enumerate([(1, 1), (1, 2), (1, 3), (2, 2), (2, 3), (2, 4)]):
        groups = in_process.groups(inter=nodes, intra=per_node)
        for index, mask in enumerate(cases.MASKS):
            heads = cases.HEADS[(number + index) % len(cases.HEADS)]
            length = cases.ROWS[groups.size] * groups.size
            problem = cases.Problem(mask, heads, 1 + index, cases.WIDTHS[index], length)
            inputs, truths = cases.solve(problem)
            layout = layouts[(number + index) % 3]
            positions = oracle.permutation(layout, groups.size, length)
            shards = [[x[rows].clone() for rows in positions] for x in inputs]
            leaves = [x.requires_grad_() for shard in shards[:3] for x in shard]
            outs = in_process.attention(
                *shards[:3], groups=groups, algorithm=algorithm, layout=layout,
                mask=cases.MASKS[mask],
            )  # fmt: skip
            results = [*outs, *torch.autograd.grad(outs, leaves, shards[3])]
            expected = [truth[rows] for truth in truths for rows in positions]
            for actual, right in zip(results, expected, strict=True):
                assert oracle.worst(actual, right) < cases.TOLERANCE, (nodes, per_node, problem)


def test_a_sink_of_minus_infinity_is_no_sink():
    """Also for rows that see nothing: their lse stays -inf."""
    seen = torch.ones(8, 8, dtype=torch.bool).tril()
    seen[:3] = False
    generator = torch.Generator().manual_seed(1)
    q, k, v, dout = (torch.randn(8, 1, 2, 4, generator=generator).double() for _ in range(4))
    out, _, dq, dk, dv = oracle.attention(q, k, v, dout, seen)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    sink = torch.full((2,), -torch.inf, dtype=torch.float64, requires_grad=True)
    groups = in_process.groups(intra=1)
    outs = in_process.attention(
        *([x] for x in leaves), groups=groups, mask=masks.Dense(seen), sink=sink
    )
    torch.autograd.backward(outs, [dout])
    for got, right in zip([outs[0], *(x.grad for x in leaves)], (out, dq, dk, dv), strict=True):
        assert oracle.worst(got, right) < cases.TOLERANCE
    assert not sink.grad.any()


def errors_of_a_call(algorithm):
    """Return on every rank the largest error of a call, and of a sink's gradient without others."""
    ulysses = {"ulysses": dist.get_world_size(), "hybrid": 2}.get(algorithm, 1)
    groups = mb.Groups.from_topology(dist.group.WORLD, intra=2, ulysses=ulysses)
    inputs, truths = cases.solve(cases.Problem("causal", (4, 2), 1, (4, 4), 32))
    rows = oracle.permutation("zigzag", groups.size, 32)[groups.rank]
    q, k, v, dout = (x[rows].clone() for x in inputs)

    sink = torch.linspace(-1, 1, 4, dtype=torch.float64)
    out, lse, *_ = oracle.attention(*inputs, oracle.visible("causal", 32), sink=sink)
    learnt = sink.clone().requires_grad_()
    mb.attention(q, k, v, groups=groups, algorithm=algorithm, sink=learnt).backward(dout)
    dist.all_reduce(learnt.grad)
    alone = oracle.worst(learnt.grad, oracle.sink_gradient(sink, lse, out, inputs[3]))

    leaves = [x.requires_grad_() for x in (q, k, v)]
    got = mb.attention(*leaves, groups=groups, algorithm=algorithm)
    results = got, *torch.autograd.grad(got, leaves, dout)
    return alone, max(oracle.worst(x, y[rows]) for x, y in zip(results, truths, strict=True))


@pytest.mark.parametrize("algorithm", ["burst", "all_gather", "prefetch", "ulysses", "hybrid"])
def test_shared_heads_and_a_sink_that_is_all_that_is_learnt(ranks, algorithm):
    for errors in ranks(4).run(errors_of_a_call, algorithm):
        assert max(errors) < cases.TOLERANCE

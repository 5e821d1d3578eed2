"""Selection and sparse attention on gloo ranks: equal to one process, errors if ranks differ."""

import compressed_layer as layer
import compressed_oracle
import pytest
import torch
import torch.distributed as dist

import megatron_burst as mb
from megatron_burst.plugins.sparse import rules
from megatron_burst.plugins.testing import in_process

S, B, D, TOP_K = 32, 2, 4, 5
SIZES = (3, D), (1, D), (3,), (4, D), (2, D), (2, D), (4, D)
LAYERS = 2


def trained(groups, rank):
    """Return ids, outs and gradients of two layers of this rank, the second backward first."""
    layout = mb.layout.make("zigzag", cp_size=groups.size)
    make = torch.Generator().manual_seed(0)
    whole = [torch.randn(S, B, *size, generator=make, dtype=torch.float64) for size in SIZES]
    each = [[mb.shard(x, layout, r) for r in rank] for x in whole]
    if not isinstance(groups, type(in_process.groups(intra=1))):
        each = [shards[0] for shards in each]
    *index, q, k, v, dout = each
    for t in (q, k, v):
        [x.requires_grad_() for x in (t if isinstance(t, list) else [t])]
    plan = in_process.prepare(q, k, v, groups=groups, layout=layout)
    actual = [
        in_process.select(*index, rule="dsa", top_k=TOP_K, plan=plan, label=n)
        for n in range(LAYERS)
    ]
    outs = [
        in_process.sparse_attention(q, k, v, each, plan=plan, label=n)
        for n, each in enumerate(actual)
    ]
    for out in reversed(outs):
        torch.autograd.backward(out, dout)
    lists = [x if isinstance(x, list) else [x] for x in (actual[0], outs[0], q, k, v)]
    return [
        (s.ids, out.detach(), *(t.grad for t in qkv)) for s, out, *qkv in zip(*lists, strict=True)
    ]


def on_this_rank():
    groups = mb.Groups.flat(dist.group.WORLD)
    return trained(groups, [groups.rank])[0]


def test_ranks_of_their_own_find_what_one_process_finds(ranks):
    expected = trained(in_process.groups(intra=2), [0, 1])
    for actual, of_rank in zip(ranks(2).run(on_this_rank), expected, strict=True):
        assert torch.equal(actual[0], of_rank[0])
        for own, other in zip(actual[1:], of_rank[1:], strict=True):
            torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)


BOUNDS = (0, 2, 2, 15, 32)
SHAPE = compressed_oracle.LayerShape(
    "csa", S, 8, 4, BOUNDS, compressed_oracle.keys_of_documents(BOUNDS, 4), 3, overlap=True
)
NEEDED = "values", "gates", "q", "kv", "bias", "sink"


def compressed_on_this_rank(tensors, dout):
    """Return output, ids and gradients of a layer with selected compressed keys on this rank."""
    groups = mb.Groups.flat(dist.group.WORLD)
    layouts = [mb.layout.make(name, cp_size=groups.size) for name in ("zigzag", "contiguous")]
    positions = [
        [layout.positions(rank, length) for rank in range(groups.size)]
        for layout, length in zip(layouts, (S, SHAPE.keys), strict=True)
    ]
    placed = layer.Placed(layouts[0], positions[0], layouts[1], positions[1])
    plans = layer.rank_plans(groups, SHAPE, placed, layer.masks(SHAPE), NEEDED)
    x = layer.split(tensors, placed, NEEDED)[groups.rank]
    out, _, ids = layer.attend(SHAPE, x, plans)
    rows = positions[0][groups.rank]
    out.backward(dout[rows])
    return rows, out.detach(), ids, {name: x[name].grad for name in NEEDED}


@pytest.mark.parametrize("size", [2, 4])
def test_compressed_keys_on_ranks_of_their_own(ranks, size):
    tensors = compressed_oracle.draw(SHAPE, 1)
    dout = torch.randn(S, SHAPE.batch, SHAPE.heads, SHAPE.width).double()
    expected = compressed_oracle.solve(SHAPE, tensors, dout)
    results = ranks(size).run(compressed_on_this_rank, tensors, dout)
    rows, outs, ids, gradients = zip(*results, strict=True)
    for part, out, own, of_rank in zip(rows, outs, ids, gradients, strict=True):
        torch.testing.assert_close(out, expected["out"][part], rtol=0, atol=1e-10)
        for t, selected in zip(part, own[:, :, 0].tolist(), strict=True):
            assert [[u for u in some if u >= 0] for some in selected] == expected["ids"][t]
        for name in ("values", "gates", "q", "kv"):
            torch.testing.assert_close(of_rank[name], expected[name][part], rtol=0, atol=1e-10)
    for name in ("bias", "sink"):  # of this rank's keys and rows only
        total = sum(of_rank[name] for of_rank in gradients)
        torch.testing.assert_close(total, expected[name], rtol=0, atol=1e-10)


def error_of(fault):
    """Return this rank's error if the second rank is wrong, or if ranks differ."""
    groups = mb.Groups.flat(dist.group.WORLD)
    layout = mb.layout.make("zigzag", cp_size=2)
    *index, q, k, v, _ = (torch.ones(S // 2, B, *size) for size in SIZES)
    second = groups.rank == 1
    named = {"rule": "dsa", "top_k": TOP_K, "groups": groups, "layout": layout}
    try:
        if fault == "top_k 0":
            mb.select(*index, **named | {"top_k": 0 if second else TOP_K})
        if fault == "top_k differs":
            mb.select(*index, **named | {"top_k": 4 + groups.rank})
        if fault == "rule differs":
            rule = rules.Qsa(block=1 + groups.rank)
            mb.select(*index, **named | {"rule": rule})
        actual = mb.select(*index, **named)
        if fault == "ids":
            ids = actual.ids + S * second
            mb.sparse_attention(q, k, v, mb.Selection(ids, layout, actual.mask), groups=groups)
        if fault == "kernel differs":
            kernel = ("aten", "reference")[groups.rank]
            mb.sparse_attention(q, k, v, actual, kernel=kernel, groups=groups)
        plan = mb.prepare(q, k, v, groups=groups, layout=layout)
        if fault == "lines swapped":
            named = {"rule": "dsa", "plan": plan}
            calls = [
                lambda: mb.indexer_loss(*index, q, k, actual, **named),
                lambda: mb.indexer_loss(*index, q, k, actual, **named),
            ]
            for call in calls[:: (1, -1)[second]]:
                call()
        if fault == "layer left out":
            for layer in range(second, 3):
                mb.sparse_attention(q, k, v, actual, plan=plan, label=layer)
    except (ValueError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize(
    ("fault", "words"),
    {
        "top_k 0": "rank 1: top_k must be a positive integer, got 0",
        "top_k differs": "ranks disagree: rank 0 has top_k 4, rank 1 has top_k 5",
        "rule differs": "ranks disagree: rank 0 has rule ('Qsa', 1",
        "ids": "rank 1: selection: ids must be -1 (empty entry) or positions from 0 to 31, got",
        "kernel differs": "ranks disagree: rank 0 has sparse kernel 'aten'",
    }.items(),
)
def test_every_rank_gets_the_same_error(ranks, fault, words):
    errors = ranks(2).run(error_of, fault)
    assert errors[0] == errors[1]
    assert errors[0][0] == "ValueError"
    assert words in errors[0][1]


@pytest.mark.parametrize("fault", ["layer left out", "lines swapped"])
def test_ranks_out_of_step_get_an_error_and_no_number(ranks, fault):
    errors = ranks(2).run(error_of, fault)
    assert any(error and error[0] == "RuntimeError" for error in errors)

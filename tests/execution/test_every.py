"""Everything at once: any mask, layout, algorithm, ulysses group, sink, softcap and kept keys.

Hypothesis draws the whole call; the truth is a dense softmax over a handwritten table, written
once more here because sinks and softcaps change it. Gradients of the truth are autograd's, on
that dense formula in float64.
"""

import math

import cases
import numpy as np
import oracle
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import megatron_burst as mb
from megatron_burst import masks

GRIDS = [(1, 1), (1, 2), (2, 1), (1, 3), (2, 2), (2, 3), (4, 1), (2, 4), (4, 2)]


@st.composite
def rules(draw, length, depth=0):
    """(mask, the same as a bool table [length, length], from positions alone)."""
    q, k = np.arange(length)[:, None], np.arange(length)[None, :]
    kinds = ["causal", "window", "dilated", "documents", "blocks", "prefix", "dense"]
    kind = draw(st.sampled_from(kinds + ["and", "or"] * (depth < 2)))
    random = np.random.default_rng(draw(st.integers(0, 999)))
    if kind == "causal":
        return masks.Causal(), q >= k
    if kind == "window":
        left, right = draw(st.integers(0, length)), draw(st.integers(0, 4))
        return masks.Window(left, right), (k >= q - left) & (k <= q + right)
    if kind == "dilated":
        stride = draw(st.integers(1, 4))
        return masks.Dilated(stride), q % stride == k % stride
    if kind == "documents":
        inner = draw(st.lists(st.integers(0, length), max_size=4))
        bounds = [0, *sorted(inner), length]
        number = np.array([sum(p >= bound for bound in bounds) for p in range(length)])
        padding = draw(st.sets(st.integers(0, len(bounds) - 2), max_size=2))
        real = ~np.isin(number - 1, list(padding))
        seen = (number[:, None] == number[None, :]) & real[:, None]
        return masks.Documents(bounds, tuple(padding)), seen
    if kind == "blocks":
        block = draw(st.sampled_from([n for n in range(1, length + 1) if length % n == 0]))
        table = random.random((length // block,) * 2) < 0.5
        return masks.BlockSparse(table, block), np.kron(table, np.ones((block, block))) > 0
    if kind == "prefix":
        n = draw(st.integers(0, length))
        return masks.Prefix(n), np.broadcast_to(k < n, (length, length))
    if kind == "dense":
        table = random.random((length, length)) < 0.4
        return masks.Dense(table), table
    (a, seen_a), (b, seen_b) = draw(rules(length, depth + 1)), draw(rules(length, depth + 1))
    return (a & b, seen_a & seen_b) if kind == "and" else (a | b, seen_a | seen_b)


@st.composite
def calls(draw):
    """Keyword arguments of one call and the sizes of its grid and tensors."""
    nodes, per_node = draw(st.sampled_from(GRIDS))
    size = nodes * per_node
    ulysses = draw(st.sampled_from([n for n in (1, 1, 2, 3, 4, 8) if size % n == 0]))
    heads, kv_heads = draw(
        st.sampled_from(
            [(h, k) for h, k in ((8, 8), (8, 4), (8, 2), (8, 1), (6, 3), (6, 1), (12, 3))
             if h % ulysses == 0 and (k % ulysses == 0 or ulysses % k == 0)] or [(24, 24)]
        )
    )  # fmt: skip
    length = size * 2 * draw(st.integers(1, 3))
    mask, seen = draw(rules(length))
    layout = draw(st.sampled_from([*cases.LAYOUTS, "balanced"]))
    if layout == "balanced":
        inner = sorted(draw(st.lists(st.integers(0, length), max_size=4)))
        layout = mb.layout.make(layout, cp_size=size, cu_seqlens=[0, *inner, length])
    algorithms = ["burst", "double_ring", "ring", "all_gather"]
    algorithms += ["hybrid"] * (ulysses > 1) + ["ulysses"] * 3 * (ulysses == size) + ["auto"] * 2
    softcap = draw(st.sampled_from([None, None, 0.8]))
    mine = max(1, kv_heads // ulysses)
    side = draw(st.sampled_from(["auto", "kv", "query"]))
    algorithm = draw(st.sampled_from(algorithms))
    groups_of_heads = [n for n in (1, 1, 2, 3, 4, 8) if mine % n == 0]
    speeds = st.sampled_from([1e-3, 1.0, 1e3])  # of links and device: what is chosen varies
    choices = {
        "algorithm": algorithm,
        "layout": layout,
        "mask": mask,
        "side": side,
        "kernel": "reference" if softcap else draw(st.sampled_from(["reference", "aten"])),
        "softcap": softcap,
        "head_chunks": draw(
            st.sampled_from([*groups_of_heads, *[None] * 8 * (algorithm == "auto")])
        ),
        "kv_cache": 0.0 if side == "query" else draw(st.sampled_from([0.0, 0.0, 0.4, 1.0])),
    }
    if not choices["kv_cache"]:
        choices["sequence_chunks"] = draw(st.sampled_from([1, 1, 2, 3]))
        choices["row_blocks"] = draw(st.sampled_from([1, 2]))
    if algorithm == "auto":
        links = draw(speeds), draw(speeds)
        rates = mb.Rates(*links, latency=1e-2 * draw(speeds), compute=1e3 * draw(speeds))
        choices["rates"] = draw(st.sampled_from([rates, None]))
    shape = (length, draw(st.integers(1, 2)), heads, kv_heads, *draw(st.sampled_from(cases.WIDTHS)))
    placement = draw(st.sampled_from(["head_first", "context_first"]))
    return (nodes, per_node, ulysses, placement), shape, choices, seen, draw(st.booleans())


def truth(q, k, v, dout, seen, softcap, sink):
    """out, dq, dk, dv and the gradient of the sink, dense and in float64."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v, sink)]
    q, k, v, sink = leaves
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("sbhd,tbhd->bhst", q, k) / math.sqrt(q.shape[3])
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    weights = torch.exp(scores) * seen
    total = weights.sum(-1, keepdim=True) + torch.exp(sink)[None, :, None, None]
    out = torch.einsum("bhst,tbhw->sbhw", weights / total.clamp_min(1e-300), v)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def rows_of(layout, ranks, length):
    """The positions of every rank: handwritten, but where a solver finds them."""
    if isinstance(layout, str):
        return oracle.permutation(layout, ranks, length)
    return [layout.positions(rank, length).tolist() for rank in range(ranks)]


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(calls())
def test_any_call_is_exact_and_sends_what_it_said(call):
    (nodes, per_node, ulysses, placement), shape, choices, seen, has_sink = call
    try:
        groups = mb.Groups.in_process(
            inter=nodes, intra=per_node, ulysses=ulysses, placement=placement
        )
    except ValueError as error:
        assert "unequal numbers of ranks" in str(error)  # noqa: PT017
        return
    length, batch, h, k, d, w = shape
    generator = torch.Generator().manual_seed(length)
    sizes = (
        (length, batch, h, d),
        (length, batch, k, d),
        (length, batch, k, w),
        (length, batch, h, w),
    )
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64) for s in sizes]
    sink = torch.randn(h, generator=generator, dtype=torch.float64)
    if not has_sink:
        sink = torch.full((h,), -torch.inf, dtype=torch.float64)
    wanted = truth(*inputs, torch.from_numpy(seen.copy()), choices["softcap"], sink)

    rows = rows_of(choices["layout"], groups.size, length)
    *qkv, douts = ([x[r].clone() for r in rows] for x in inputs)
    leaves = [x.requires_grad_() for xs in qkv for x in xs]
    learnt = sink.clone().requires_grad_() if has_sink else None
    plan = mb.prepare(*qkv, groups=groups, **choices)
    outs = mb.attention(*qkv, plan=plan, sink=learnt)
    torch.autograd.backward(outs, douts)

    parts = [outs, *(leaves[i * groups.size : (i + 1) * groups.size] for i in range(3))]
    for name, part, whole in zip(("out", "dq", "dk", "dv"), parts, wanted, strict=False):
        for rank, x in enumerate(part):
            got = x.detach() if name == "out" else x.grad
            assert oracle.worst(got, whole[rows[rank]]) < cases.TOLERANCE, (name, rank)
    if learnt is not None:
        assert oracle.worst(learnt.grad, wanted[4]) < cases.TOLERANCE
    there, back = plan.traffic()
    sent = groups.counters
    assert (sent.intra, sent.inter) == (there.intra + back.intra, there.inter + back.inter)


def one_head_group_step(algorithm, layout):
    """On every rank: the worst error of a head-parallel call against the oracle."""
    ulysses = dist.get_world_size() if algorithm == "ulysses" else 2
    groups = mb.Groups.from_topology(dist.group.WORLD, intra=2, ulysses=ulysses)
    problem = cases.Problem("causal", (4, 2), 1, (4, 4), 32)
    inputs, (out, dq, dk, dv) = cases.solve(problem)
    rows = oracle.permutation(layout, groups.size, 32)[groups.rank]
    q, k, v, dout = (x[rows].clone() for x in inputs)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    got = mb.attention(*leaves, groups=groups, algorithm=algorithm, layout=layout)
    grads = torch.autograd.grad(got, leaves, dout)
    truths = (out, dq, dk, dv)
    return max(oracle.worst(x, y[rows]) for x, y in zip((got, *grads), truths, strict=True))


def test_head_chunks_on_real_processes(ranks):
    pool = ranks(4)
    for algorithm in ("ulysses", "hybrid", "double_ring", "all_gather"):
        errors = pool.run(one_head_group_step, algorithm, "zigzag")
        assert max(errors) < cases.TOLERANCE, algorithm
    pool.close()


def test_a_sink_of_minus_infinity_is_no_sink():
    """Also for rows that see nothing: their lse stays -inf."""
    seen = torch.ones(8, 8, dtype=torch.bool).tril()
    seen[:3] = False
    generator = torch.Generator().manual_seed(1)
    q, k, v, dout = (torch.randn(8, 1, 2, 4, generator=generator).double() for _ in range(4))
    out, _, dq, dk, dv = oracle.attention(q, k, v, dout, seen)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    sink = torch.full((2,), -torch.inf, dtype=torch.float64, requires_grad=True)
    groups = mb.Groups.in_process(intra=1)
    outs = mb.attention(*([x] for x in leaves), groups=groups, mask=masks.Dense(seen), sink=sink)
    torch.autograd.backward(outs, [dout])
    for got, right in zip([outs[0], *(x.grad for x in leaves)], (out, dq, dk, dv), strict=True):
        assert oracle.worst(got, right) < cases.TOLERANCE
    assert not sink.grad.any()


def sink_alone(algorithm):
    """On every rank: (gradient of a sink where nothing else needs one, the same by hand)."""
    ulysses = {"ulysses": dist.get_world_size(), "hybrid": 2}.get(algorithm, 1)
    groups = mb.Groups.from_topology(dist.group.WORLD, intra=2, ulysses=ulysses)
    problem = cases.Problem("causal", (4, 2), 1, (4, 4), 32)
    inputs, _ = cases.solve(problem)
    sink = torch.linspace(-1, 1, 4, dtype=torch.float64)
    wanted = truth(*inputs, oracle.visible("causal", 32), None, sink)[4]
    rows = oracle.permutation("zigzag", groups.size, 32)[groups.rank]
    q, k, v, dout = (x[rows] for x in inputs)
    learnt = sink.clone().requires_grad_()
    mb.attention(q, k, v, groups=groups, algorithm=algorithm, sink=learnt).backward(dout)
    dist.all_reduce(learnt.grad)
    return oracle.worst(learnt.grad, wanted)


@pytest.mark.parametrize("algorithm", ["burst", "ulysses", "hybrid"])
def test_a_sink_may_be_all_that_is_learnt(ranks, algorithm):
    assert max(ranks(4).run(sink_alone, algorithm)) < cases.TOLERANCE


REFUSED = [
    ({"softcap": 0.5, "kernel": "aten"}, {}, "kernel aten has no softcap, got softcap=0.5"),
    (
        {"softcap": -1.0, "kernel": "reference"},
        {},
        "softcap must be .* got -1.0",
    ),
    ({"kv_cache": 1.5}, {}, "kv_cache must be a fraction from 0 to 1, got 1.5"),
    (
        {"kv_cache": 0.5, "side": "query"},
        {},
        "kv_cache=0.5 keeps keys, which side='query' does not send",
    ),
    ({"algorithm": "ulysses"}, {}, "algorithm ulysses shares the heads over all 4 ranks"),
    ({"algorithm": "hybrid"}, {}, "algorithm hybrid needs groups that share heads"),
    ({"head_chunks": 3}, {}, "head_chunks must divide the 4 key/value heads .* got 3"),
    ({"head_chunks": 0}, {}, "head_chunks must divide the 4 key/value heads .* got 0"),
    ({"head_chunks": "4"}, {}, "head_chunks must divide the 4 key/value heads .* got '4'"),
    ({"head_chunks": 2}, {"ulysses": 2, "heads": 4, "kv_heads": 2}, "the 1 key/value heads"),
    ({"mask": masks.Documents([0, 9])}, {}, "cu_seqlens must end at .*, 16, got 9"),
    (
        {},
        {"ulysses": 4, "heads": 6},
        "4 ulysses ranks must divide the 6 query heads; make mb.Groups with ulysses=1 or 2",
    ),
    ({}, {"ulysses": 4, "heads": 12, "kv_heads": 6}, "4 ulysses ranks must divide the 6 key"),
]


@pytest.mark.parametrize(("choices", "sizes", "words"), REFUSED)
def test_what_cannot_be_served_is_refused(choices, sizes, words):
    sizes = {"heads": 4, "kv_heads": sizes.get("heads", 4), "ulysses": 1} | sizes
    groups = mb.Groups.in_process(inter=2, intra=2, ulysses=sizes["ulysses"])
    q, k = (torch.zeros(4, 1, sizes[n], 8) for n in ("heads", "kv_heads"))
    with pytest.raises(ValueError, match=words):
        mb.attention([q] * 4, [k] * 4, [k] * 4, groups=groups, **choices)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: mb.Groups.in_process(intra=4, ulysses=3), "ulysses: 3 must divide the 4 ranks"),
        (lambda: mb.Groups.in_process(intra=4, placement="heads"), "placement must be one of"),
        (
            lambda: mb.Groups.in_process(inter=3, intra=2, ulysses=2, placement="context_first"),
            "gives a ring whose nodes hold unequal numbers of ranks",
        ),
        (
            lambda: mb.layout.make("block_striped", cp_size=4),
            "block: layout block_striped needs one",
        ),
        (lambda: mb.layout.make("block_striped", cp_size=4, block=6), "4 ranks must divide every"),
        (lambda: mb.layout.make("striped", cp_size=4, block=8), "block goes with layout block_str"),
        (
            lambda: mb.layout.make("striped", cp_size=4, cu_seqlens=[0, 8]),
            "goes with layout zigzag",
        ),
        (
            lambda: mb.layout.make("zigzag", cp_size=4, cu_seqlens=[0, 9]),
            "multiples of 8 positions",
        ),
        (lambda: mb.layout.make("zigzag", cp_size=4, cu_seqlens=[1, 9]), "start at 0"),
        (lambda: mb.layout.make("zigzag", cp_size=2, cu_seqlens=[0, 4.5]), "must be integers"),
        (lambda: mb.layout.make("zigzag", cp_size=2, cu_seqlens=[0, 0]), "hold no position"),
        (lambda: mb.layout.make("zigzag", cp_size=2.0), "cp_size must be an integer, got 2.0"),
        (
            lambda: mb.layout.make("block_striped", cp_size=2, block=4.0),
            "block must be an integer, got 4.0",
        ),
        (lambda: mb.Groups.in_process(inter=0, intra=2), "at least one rank, got .*0"),
        (lambda: mb.Groups.in_process(intra=2.0), "intra .*integer, got 2.0"),
        (lambda: mb.Groups.in_process(intra=2, ulysses=None), "ulysses .*integer, got None"),
    ],
)
def test_grids_and_layouts_that_mean_nothing_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_zigzag_within_documents_by_hand():
    """Two documents of 8 and 4 on two ranks: each document's first and last piece to rank 0."""
    order = mb.layout.make("zigzag", cp_size=2, cu_seqlens=[0, 8, 8, 12])
    assert order.positions(0, 12).tolist() == [0, 1, 6, 7, 8, 11]
    assert order.positions(1, 12).tolist() == [2, 3, 4, 5, 9, 10]
    block = mb.layout.make("block_striped", cp_size=2, block=4)
    assert block.positions(1, 8).tolist() == [1, 3, 5, 7]
    with pytest.raises(ValueError, match="multiple of block=4, got 6"):
        block.positions(0, 6)


def test_a_block_table_on_the_layout_made_for_it_is_exact():
    table = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 1]])
    problem = cases.Problem("causal", (4, 2), 1, (4, 4), 24)
    inputs, _ = cases.solve(problem)
    seen = torch.tensor([[bool(table[i // 8, j // 8]) and j <= i for j in range(24)]
                         for i in range(24)])  # fmt: skip
    out, _, *grads = oracle.attention(*inputs, seen)
    rows = [[r + 2 * i for i in range(12)] for r in range(2)]
    shards = [[x[r].clone().requires_grad_() for r in rows] for x in inputs[:3]]
    layout = mb.layout.make("block_striped", cp_size=2, block=8)
    plan = mb.prepare(
        *shards, groups=mb.Groups.in_process(intra=2), layout=layout,
        mask=masks.BlockSparse(table, 8) & masks.Causal(),
    )  # fmt: skip
    assert "layout block_striped" in plan.describe()
    outs = mb.attention(*shards, plan=plan)
    torch.autograd.backward(outs, [inputs[3][r] for r in rows])
    for rank, r in enumerate(rows):
        assert oracle.worst(outs[rank], out[r]) < cases.TOLERANCE
        for shard, grad in zip(shards, grads, strict=True):
            assert oracle.worst(shard[rank].grad, grad[r]) < cases.TOLERANCE


def test_documents_on_their_own_layout_are_exact():
    bounds = [0, 8, 20, 24]
    problem = cases.Problem("causal", (4, 2), 1, (4, 4), 24)
    inputs, _ = cases.solve(problem)
    number = [sum(p >= b for b in bounds) for p in range(24)]
    seen = torch.tensor([[number[i] == number[j] and j <= i for j in range(24)] for i in range(24)])
    out, _, *grads = oracle.attention(*inputs, seen)
    order = mb.layout.make("zigzag", cp_size=2, cu_seqlens=bounds)
    shards = [[mb.shard(x, order, r).requires_grad_() for r in range(2)] for x in inputs[:3]]
    groups = mb.Groups.in_process(intra=2)
    mask = masks.Documents(bounds) & masks.Causal()
    outs = mb.attention(*shards, groups=groups, layout=order, mask=mask)
    torch.autograd.backward(outs, [mb.shard(inputs[3], order, r) for r in range(2)])
    assert oracle.worst(mb.unshard(outs, order), out) < cases.TOLERANCE
    for shard, grad in zip(shards, grads, strict=True):
        assert oracle.worst(mb.unshard([x.grad for x in shard], order), grad) < cases.TOLERANCE

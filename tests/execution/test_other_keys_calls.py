"""Keys of another sequence with the other options of a call, against the dense oracle.

Here are calls that `test_other_keys.py` does not draw: low precision, softcap, largest scores,
checkpoints, torch.compile, row chunks with keys in host memory, and forecasts of "auto".
"""

import warnings

import oracle
import pytest
import torch
import torch.nn.functional as F

import megatron_burst as mb
from megatron_burst.plugins.testing import in_process

RANKS, ROWS, HEADS, KV_HEADS, D, W = 4, 4, 4, 2, 8, 6
QUERIES = RANKS * ROWS
UNSUMMED = mb.layout.Replicated(sum_gradients=False)
LAYOUTS = ["replicated", "contiguous", "striped"]
EXACT = 1e-10


def problem(keys, dtype=torch.float64, seed=0):
    """q, k, v and dout of the whole sequences."""
    make = torch.Generator().manual_seed(seed)
    shapes = (
        (QUERIES, 1, HEADS, D), (keys, 1, KV_HEADS, D), (keys, 1, KV_HEADS, W),
        (QUERIES, 1, HEADS, W),
    )  # fmt: skip
    return [torch.randn(s, generator=make, dtype=torch.float64).to(dtype) for s in shapes]


def places(key_layout, keys):
    """The positions of the queries and of the keys of each rank."""
    queries = oracle.permutation("zigzag", RANKS, QUERIES)
    if key_layout in ("replicated", UNSUMMED):
        return queries, [list(range(keys))] * RANKS
    return queries, oracle.permutation(key_layout, RANKS, keys)


def windows(keys):
    """A mask of windows of 2 positions, and the table of visible pairs."""
    seen = [[2 * w + 1 <= t for w in range(keys)] for t in range(QUERIES)]
    return mb.masks.Compressed(2), torch.tensor(seen)


class Call:
    """One call of attention on four ranks in this process."""

    def __init__(self, key_layout, keys=QUERIES // 2, dtype=torch.float64, groups=None, **choices):
        self.mask, self.seen = windows(keys)
        self.whole, (self.rows, self.columns) = problem(keys, dtype), places(key_layout, keys)
        self.groups = groups or in_process.groups(inter=2, intra=2)
        self.leaves = [
            [x[rows].clone().requires_grad_() for rows in held]
            for x, held in zip(self.whole[:3], (self.rows, self.columns, self.columns), strict=True)
        ]
        self.douts = [self.whole[3][rows] for rows in self.rows]
        self.plans = in_process.prepare(
            *self.leaves, groups=self.groups, mask=self.mask, key_layout=key_layout, **choices
        )

    def attend(self, **keywords):
        return in_process.attention(*self.leaves, plan=self.plans, **keywords)

    def errors(self, outs, **choices):
        """The largest errors of out, dq, dk and dv."""
        flat = [x for each in self.leaves for x in each]
        grads = torch.autograd.grad(outs, flat, self.douts)
        wanted = oracle.attention(*self.whole, self.seen, **choices)
        found = []
        for which, held, parts in (
            (0, self.rows, outs), (2, self.rows, grads[:RANKS]),
            (3, self.columns, grads[RANKS : 2 * RANKS]), (4, self.columns, grads[2 * RANKS :]),
        ):  # fmt: skip
            found.append(max(
                oracle.worst(part, wanted[which][at]) for part, at in zip(parts, held, strict=True)
            ))  # fmt: skip
        return found


def stock(call):
    """The largest errors of torch's own operator on one device."""
    leaves = [x.clone().requires_grad_() for x in call.whole[:3]]
    q, *kv = leaves
    wide = [q, *(x.repeat_interleave(HEADS // KV_HEADS, dim=2) for x in kv)]
    out = F.scaled_dot_product_attention(
        *(x.permute(1, 2, 0, 3) for x in wide), attn_mask=call.seen | ~call.seen.any(1)[:, None]
    ).permute(2, 0, 1, 3)
    blind = ~call.seen.any(1)
    out = out.masked_fill(blind[:, None, None, None], 0)
    grads = torch.autograd.grad(out, leaves, call.whole[3])
    wanted = oracle.attention(*call.whole, call.seen)
    return [
        oracle.worst(got, right) for got, right in zip((out, *grads), (wanted[0], *wanted[2:]),
        strict=True)
    ]  # fmt: skip


@pytest.mark.parametrize("key_layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_errors_are_bounded_by_those_of_torch(key_layout, dtype):
    call = Call(key_layout, dtype=dtype)
    unit = torch.finfo(dtype).eps
    largest = [x.abs().max().item() for x in oracle.attention(*call.whole, call.seen)[2:]]
    limits = zip(stock(call), [1.0, *largest], strict=True)
    for error, (theirs, size) in zip(call.errors(call.attend()), limits, strict=True):
        assert error <= 3 * theirs + 2 * unit * size


@pytest.mark.parametrize("key_layout", LAYOUTS)
def test_softcap_and_the_largest_scores(key_layout):
    call = Call(
        key_layout, softcap=0.7, kernel="reference",
        max_logits=torch.full((HEADS,), -torch.inf, dtype=torch.float64),
    )  # fmt: skip
    largest = torch.full((HEADS,), -torch.inf, dtype=torch.float64)  # of all ranks
    outs = call.attend(max_logits=largest)
    assert max(call.errors(outs, softcap=0.7)) < EXACT
    q, k, *_ = call.whole
    k = k.repeat_interleave(HEADS // KV_HEADS, 2)
    scores = torch.einsum("sbhd,tbhd->hbst", q, k) / D**0.5
    scores = (0.7 * (scores / 0.7).tanh()).masked_fill(~call.seen, -torch.inf)
    assert oracle.worst(largest, scores.amax((1, 2, 3))) < EXACT


def test_plans_are_reused_only_for_the_same_layout_of_keys():
    groups = in_process.groups(inter=2, intra=2)
    for _ in range(2):
        for key_layout in LAYOUTS:
            call = Call(key_layout, groups=groups)
            assert max(call.errors(call.attend(label=key_layout))) < EXACT


@pytest.mark.parametrize("key_layout", LAYOUTS)
def test_deterministic_algorithms(key_layout):
    torch.use_deterministic_algorithms(True)
    try:
        call = Call(key_layout)
        first, second = call.attend(), call.attend()
        assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
        assert max(call.errors(first)) < EXACT
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("keep", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("key_layout", LAYOUTS)
def test_checkpoints(key_layout, keep):
    """Two micro-batches are in flight; backward recomputes only rows that are not kept."""
    call = Call(key_layout, store=keep, algorithm="ring")

    def attend(plan, q, k, v, label):
        return mb.checkpoint(
            lambda *qkv: mb.attention(*qkv, plan=plan, label=label), q, k, v, keep=keep
        )

    outs = [
        in_process.on_ranks(call.groups, attend, call.plans.ranks, *call.leaves, [label] * RANKS)
        for label in range(2)
    ]
    for each in outs:
        assert max(call.errors(each)) < EXACT


def alone(key_layout="replicated", **choices):
    """q, k, v, dout and the table of one rank, and its plan."""
    q, k, v, dout = problem(QUERIES // 2)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    mask, seen = windows(len(k))
    options = {"groups": mb.Groups.single(), "layout": "contiguous"} | choices
    plan = mb.prepare(*leaves, mask=mask, key_layout=key_layout, **options)
    return leaves, dout, seen, plan


def test_compiled_code_around_the_calls():
    leaves, dout, seen, plan = alone()

    def layer(q, k, v):
        out = mb.attention(2 * q, k, v, plan=plan)
        return out + mb.joint_attention(2 * q, [(k, v, plan), (k, v, plan)])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = torch.compile(layer, backend="eager")(*leaves)
    (dq,) = torch.autograd.grad(out, leaves[:1], dout)
    q, k, v = leaves
    single = oracle.attention(2 * q, k, v, dout, seen)
    twice = oracle.attention(
        2 * q, torch.cat([k, k]), torch.cat([v, v]), dout, torch.cat([seen, seen], 1)
    )
    assert oracle.worst(out, single[0] + twice[0]) < EXACT
    assert oracle.worst(dq, 2 * (single[2] + twice[2])) < EXACT


# --- row chunks, with and without keys in host memory ----------------------------------------


def by_chunks(plan, q, k, v, dout, host):
    """out, dq, dk and dv of one rank, computed one row chunk at a time."""
    call, results = plan.chunked(k, v, host=host), []
    for c, rows in enumerate(plan.row_chunks):
        results.append((rows, *call.forward(c, q[rows])))
    back = plan.chunked(k, v)
    out, dq = torch.empty_like(dout), torch.empty_like(q)
    for c, (rows, part, lse) in enumerate(results):
        out[rows] = part
        dq[rows] = back.backward(c, q[rows].contiguous(), part, lse, dout[rows])
    dk, dv, _ = back.gradients()
    return out, dq.detach(), dk, dv


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("ulysses", [1, 2])
@pytest.mark.parametrize("key_layout", [*LAYOUTS, UNSUMMED], ids=str)
def test_row_chunks(key_layout, ulysses, on_host):
    q, k, v, dout = problem(2 * QUERIES)
    rows, columns = places(key_layout, len(k))
    mask, seen = windows(len(k))
    groups = in_process.groups(inter=2, intra=2, ulysses=ulysses)
    held = rows, columns, columns, rows
    shards = [[x[at] for at in own] for x, own in zip((q, k, v, dout), held, strict=True)]
    plans = in_process.prepare(
        *shards[:3], groups=groups, mask=mask, key_layout=key_layout, sequence_chunks=2,
        needs_grad=(True,) * 3,
    )  # fmt: skip
    hosts = [mb.HostMemory(1 << 20, device="cpu") if on_host else None for _ in range(RANKS)]
    before = [(rank.counters.intra, rank.counters.inter) for rank in groups.ranks]
    found = groups.run(by_chunks, plans.ranks, *shards, hosts)
    again = 2 if ulysses > 1 and key_layout not in ("replicated", UNSUMMED) else 1
    wanted = oracle.attention(q, k, v, dout, seen)
    for rank, (out, dq, dk, dv) in enumerate(found):
        own = wanted[3:]
        if key_layout == UNSUMMED:
            at = rows[rank]
            own = oracle.attention(q[at], k, v, dout[at], seen[at])[3:]
        assert oracle.worst(out, wanted[0][rows[rank]]) < EXACT
        assert oracle.worst(dq, wanted[2][rows[rank]]) < EXACT
        assert oracle.worst(dk, own[0][columns[rank]]) < EXACT
        assert oracle.worst(dv, own[1][columns[rank]]) < EXACT
        forward, backward = plans.ranks[rank].traffic(host=on_host)
        counters = groups.ranks[rank].counters
        sent = counters.intra - before[rank][0] + counters.inter - before[rank][1]
        resent = (again - 1) * len(columns[rank]) * KV_HEADS * (D + W) * 8 // ulysses
        assert sent == (forward + backward).total + resent


def test_row_chunks_that_do_not_fit_are_refused_by_name():
    (q, k, v), *_, plan = alone()
    host = mb.HostMemory(1 << 20, device="cpu")
    with pytest.raises(ValueError, match="host: a single row chunk"):
        plan.chunked(k, v, host=host)
    *_, plan = alone(sequence_chunks=2)
    with pytest.raises(ValueError, match="k: the plan was made for"):
        plan.chunked(q, v)
    *_, plan = alone("contiguous", sequence_chunks=2, algorithm="tile")
    with pytest.raises(ValueError, match="host: algorithm tile sends more than keys"):
        plan.chunked(k, v, host=host)


# --- bytes -----------------------------------------------------------------------------------

SLOW = mb.Rates(50e6, 12.5e6, latency=1e-4, compute=1e9)


@pytest.mark.parametrize(("chunks", "ulysses"), [(1, 1), (2, 1), (1, 2), (2, 4)])
@pytest.mark.parametrize("keys", [0, 1, 64])
def test_auto_forecasts_the_bytes_of_its_plan(keys, chunks, ulysses):
    tensors = [
        [torch.zeros(rows, 1, heads, 8, requires_grad=True) for _ in range(RANKS)]
        for rows, heads in ((8, 8), (keys, 4), (keys, 4))
    ]
    for rates in (SLOW, mb.Rates(1e9, 1e6, compute=1e12)):
        plans = in_process.prepare(
            *tensors, groups=in_process.groups(inter=2, intra=2, ulysses=ulysses),
            algorithm="auto", rates=rates, mask=mb.masks.Causal(), key_layout="contiguous",
            sequence_chunks=chunks,
        )  # fmt: skip
        sent = [one for plan in plans.ranks for one in plan.traffic()]
        total = sum(one.intra for one in sent), sum(one.inter for one in sent)
        forecast = plans.ranks[0].choice.taken.sent
        assert (forecast.intra, forecast.inter) == total


def test_auto_measures_nothing_for_replicated_keys():
    groups = in_process.groups(intra=2)
    q, kv = ([torch.zeros(rows, 1, 4, 8)] * 2 for rows in (4, 6))
    plans = in_process.prepare(
        q, kv, kv, groups=groups, algorithm="auto", mask=mb.masks.Full(), key_layout="replicated",
        grad_wire_dtype="auto",
    )  # fmt: skip
    assert plans.choice is None
    assert "speeds" not in groups.cache


def test_received_keys():
    """Two ranks exchange keys [rows, 1, 2, 8] and values [rows, 1, 2, 6] of another sequence."""
    for rows in (0, 2, 64):
        q, k, v = (
            [torch.zeros(n, 1, 2, width).double() for _ in range(2)]
            for n, width in ((4, 8), (rows, 8), (rows, 6))
        )
        given = {"groups": in_process.groups(intra=2), "mask": mb.masks.Full(), "algorithm": "ring"}
        own = in_process.prepare(q, k, v, key_layout="striped", **given)
        assert [plan.held_bytes for plan in own.ranks] == [rows * 2 * (8 + 6) * 8] * 2
        assert [sum((a + b).total for a, b in [p.traffic("kv")]) for p in own.ranks] == (
            [2 * rows * 2 * (8 + 6) * 8] * 2
        )
        assert all(plan.longest_message >= rows * 2 * (8 + 6) * 8 for plan in own.ranks)
        everywhere = in_process.prepare(q, k, v, key_layout="replicated", **given)
        assert [plan.held_bytes for plan in everywhere.ranks] == [0, 0]


def test_a_sum_of_gradients_has_equal_parts():
    """15 numbers of dk [3, 1, 1, 3] and dv [3, 1, 1, 2] are padded to 4 per rank."""
    groups = in_process.groups(inter=2, intra=2)
    q, k, v = (
        [torch.randn(rows, 1, 1, n).double().requires_grad_() for _ in range(RANKS)]
        for rows, n in ((2, 3), (3, 3), (3, 2))
    )
    plans = in_process.prepare(
        q, k, v, groups=groups, mask=mb.masks.Full(), key_layout="replicated"
    )
    outs = in_process.attention(q, k, v, plan=plans)
    torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])
    for plan, rank in zip(plans.ranks, groups.ranks, strict=True):
        forward, backward = plan.traffic()
        assert forward.total == 0
        assert (backward.intra, backward.inter) == (2 * 4 * 8, 2 * 2 * 4 * 8)
        assert (rank.counters.intra, rank.counters.inter) == (backward.intra, backward.inter)


def test_only_the_keys_of_the_documents_of_a_rank_are_sent():
    """Of 16 keys on two ranks, queries of rank 0 see 2 keys, and queries of rank 1 the others."""
    mask = mb.masks.Documents([0, 4, 8], key_cu_seqlens=[0, 2, 16])
    q, kv = ([torch.zeros(rows, 1, 1, 4).double()] * 2 for rows in (4, 8))
    plans = in_process.prepare(
        q, kv, kv, groups=in_process.groups(intra=2), layout="contiguous", mask=mask,
        key_layout="contiguous",
    )  # fmt: skip
    assert [plan.traffic()[0].total for plan in plans.ranks] == [6 * (4 + 4) * 8, 0]


@pytest.mark.parametrize("ulysses", [1, 2])
def test_replicated_keys_share_no_heads(ulysses):
    """The number of head chunks divides all key heads, because every rank computes all heads."""
    groups = in_process.groups(intra=2, ulysses=ulysses)
    q, k, v = ([x] * 2 for x in (torch.zeros(4, 1, 4, 8), *torch.zeros(2, 6, 1, 2, 8).unbind()))
    given = {"groups": groups, "mask": mb.masks.Full(), "head_chunks": 2}
    assert in_process.prepare(q, k, v, key_layout="replicated", **given).head_chunks == 2


# --- joint calls -----------------------------------------------------------------------------

NEEDS = [(1, 1, 1, 1, 1), (0, 1, 1, 1, 1), (1, 0, 0, 1, 1), (1, 1, 0, 0, 1), (0, 0, 0, 1, 0),
         (1, 0, 0, 0, 0), (0, 0, 0, 0, 0)]  # fmt: skip


@pytest.mark.parametrize("needs", NEEDS)
@pytest.mark.parametrize("key_layout", ["replicated", "contiguous"])
def test_joint_calls_with_frozen_inputs(key_layout, needs):
    """Frozen queries or keys, softcap, two micro-batches in flight."""
    q, k, v, dout = problem(2 * QUERIES)
    parts = slice(0, QUERIES), slice(QUERIES, 2 * QUERIES)
    rows, columns = places(key_layout, QUERIES)
    groups = in_process.groups(inter=2, intra=2)
    qs = [q[at].requires_grad_(bool(needs[0])) for at in rows]
    sets, seen = [], []
    for number, part in enumerate(parts):
        held = rows if number == 0 else columns
        of_keys = [
            [x[part][at].requires_grad_(bool(need)) for at in held]
            for x, need in zip((k, v), needs[1 + 2 * number :], strict=False)
        ]
        mask = mb.masks.Causal() if number == 0 else mb.masks.Compressed(1)
        options = {} if number == 0 else {"key_layout": key_layout}
        plans = in_process.prepare(
            qs, *of_keys, groups=groups, mask=mask, softcap=0.9, kernel="reference", **options
        )
        sets.append((*of_keys, plans))
        seen.append(torch.ones(QUERIES, QUERIES).tril().bool())
    outs = [in_process.joint_attention(qs, sets, groups=groups, label=i) for i in range(2)]
    wanted = oracle.attention(q, k, v, dout, torch.cat(seen, 1), softcap=0.9)
    for each in outs:
        for part, at in zip(each, rows, strict=True):
            assert oracle.worst(part, wanted[0][at]) < EXACT
            assert part.requires_grad == any(needs)
        if any(needs):
            torch.autograd.backward(each, [dout[at] for at in rows])
    expected = [(qs, wanted[2], rows)]
    for (ks, vs, _), part, held in zip(sets, parts, (rows, columns), strict=True):
        expected += [(ks, wanted[3][part], held), (vs, wanted[4][part], held)]
    for (leaves, gradient, held), need in zip(expected, needs, strict=True):
        for leaf, at in zip(leaves, held, strict=True):
            assert (leaf.grad is not None) == bool(need)
            assert not need or oracle.worst(leaf.grad, 2 * gradient[at]) < EXACT


@pytest.mark.parametrize("keep", [0.0, 1.0])
def test_joint_calls_in_checkpoints(keep):
    leaves, dout, seen, plan = alone(store=keep)
    q, k, v = leaves
    calls = []
    kernel = CountingKernel(plan.kernel, calls)
    plan = plan.with_kernel(kernel)
    out = mb.checkpoint(
        lambda *x: mb.joint_attention(x[0], [(*x[1:], plan)], label=1), *leaves, keep=keep
    )
    grads = torch.autograd.grad(out, leaves, dout)
    wanted = oracle.attention(q, k, v, dout, seen)
    for got, right in zip((out, *grads), (wanted[0], *wanted[2:]), strict=True):
        assert oracle.worst(got, right) < EXACT
    assert len(calls) == 2 - keep  # a kept output is not computed again


class CountingKernel:
    """A kernel that records its forward calls."""

    def __init__(self, kernel, calls):
        self.kernel, self.calls = kernel, calls

    def __getattr__(self, name):
        return getattr(self.kernel, name)

    def forward(self, *arguments, **named):
        self.calls.append(arguments)
        self.kernel.forward(*arguments, **named)


def test_joint_calls_in_checkpoints_that_keep_some_rows_are_refused():
    leaves, *_, plan = alone(store=0.5)
    with pytest.raises(ValueError, match=r"results of all rows or of none .* store=0.5; use"):
        mb.joint_attention(leaves[0], [(*leaves[1:], plan)])
    plan = alone()[-1]
    with pytest.raises(ValueError, match=r"keep: joint attention .* keeps 0.5; use .*keep=1.0"):
        mb.checkpoint(lambda q, k, v: mb.joint_attention(q, [(k, v, plan)]), *leaves, keep=0.5)
    with pytest.raises(ValueError, match=r"store must be equal in all plans, None, got 1.0"):
        mb.joint_attention(
            leaves[0], [(*leaves[1:], alone()[-1]), (*leaves[1:], alone(store=1.0)[-1])]
        )


@pytest.mark.parametrize("key_layout", LAYOUTS)
def test_joint_calls_return_lse(key_layout):
    call = Call(key_layout)
    sink = torch.randn(HEADS, dtype=torch.float64)
    q, *keys = call.leaves
    outs, lse = in_process.joint_attention(
        q, [(*keys, call.plans)], groups=call.groups, sink=sink, return_lse=True
    )
    _, wanted, *_ = oracle.attention(*call.whole, call.seen, sink=sink)
    for part, at in zip(lse, call.rows, strict=True):
        assert not part.requires_grad
        assert oracle.worst(part, wanted[at]) < EXACT
    assert outs[0].requires_grad


def test_values_that_are_the_keys_are_sent_once():
    """v=None halves the bytes of keys in forward and backward; a plan is for one of the two."""
    keys = [torch.randn(ROWS // 2, 1, KV_HEADS, D, dtype=torch.float64) for _ in range(RANKS)]
    q = [torch.randn(ROWS, 1, HEADS, D, dtype=torch.float64) for _ in range(RANKS)]
    once, twice = (
        in_process.prepare(
            q, keys, v, groups=in_process.groups(intra=RANKS), mask=mb.masks.Full(),
            key_layout="contiguous", needs_grad=(True, True, True), side="kv",
        )
        for v in (None, keys)
    )  # fmt: skip
    for a, b in zip(once.ranks[0].traffic(), twice.ranks[0].traffic(), strict=True):
        assert b.total == 2 * a.total > 0
    with pytest.raises(ValueError, match=r"plan: made for .* with v=None .*call mb.prepare"):
        in_process.attention(q, keys, keys, plan=once)
    with pytest.raises(ValueError, match=r"got .* with v=None \(values are the keys\)"):
        in_process.attention(q, keys, None, plan=twice)
    with pytest.raises(ValueError, match=r"v is None .* got sequence_chunks=2; pass v=k"):
        in_process.prepare(
            q, keys, None, groups=in_process.groups(intra=RANKS), mask=mb.masks.Full(),
            key_layout="contiguous", sequence_chunks=2,
        )  # fmt: skip


def test_a_plan_from_shapes_has_its_own_number_of_keys():
    groups = mb.Groups.single()
    options = {"groups": groups, "key_layout": "contiguous", "mask": mb.masks.Full()}
    plan = mb.prepare(shape=(6, 1, 4, 8), kv_heads=2, key_rows=3, **options)
    q, k = torch.randn(6, 1, 4, 8), torch.randn(3, 1, 2, 8)
    assert plan.matches(q, k, k)
    assert not plan.matches(q, q, q)
    with pytest.raises(ValueError, match="key_rows must be an integer of at least 0, got -1"):
        mb.prepare(shape=(6, 1, 4, 8), key_rows=-1, **options)
    with pytest.raises(ValueError, match="k, v must have the 6 rows of q, got 3"):
        mb.prepare(shape=(6, 1, 4, 8), key_rows=3, groups=groups)

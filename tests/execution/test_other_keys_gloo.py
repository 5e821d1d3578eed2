"""Keys of another sequence on real process groups: numbers, bytes, and ranks that differ.

The oracle is dense and in float64. Bytes of the sums of replicated keys' gradients are stated here
by hand; the bytes of all passes must equal what each plan announces.
"""

import re
from datetime import timedelta
from itertools import pairwise

import oracle
import pytest
import torch
import torch.distributed as dist

import megatron_burst as mb
from megatron_burst.comm.transport import ProcessEndpoint

TOLERANCE = 1e-10
ROWS, HEADS, KV_HEADS, D, W = 4, 8, 4, 4, 6  # rows of q on each rank
GRIDS = {2: [(2, 1), (2, 2), (1, 1)], 4: [(2, 1), (2, 2), (4, 4)]}  # ranks per node, sharing heads
UNSUMMED = mb.layout.Replicated(sum_gradients=False)
KEYS = [("replicated", 5), (UNSUMMED, 5), ("contiguous", 1), ("striped", 7), ("zigzag", 8)]
TIMEOUT = 2.0  # seconds, of the process groups whose ranks differ


def whole(seed, world, keys):
    """q, k, v and dout of the whole sequences."""
    make = torch.Generator().manual_seed(seed)
    shapes = [
        (ROWS * world, 1, HEADS, D), (keys, 1, KV_HEADS, D), (keys, 1, KV_HEADS, W),
        (ROWS * world, 1, HEADS, W),
    ]  # fmt: skip
    return [torch.randn(shape, generator=make, dtype=torch.float64) for shape in shapes]


def replicated(key_layout):
    return key_layout == "replicated" or isinstance(key_layout, mb.layout.Replicated)


def positions(key_layout, world, rows):
    """The positions of the keys of each rank, and their number."""
    if replicated(key_layout):
        return [list(range(rows))] * world, rows
    return oracle.permutation(key_layout, world, rows * world), rows * world


def mask_of(queries, keys):
    """Two documents, the second without causality, and the table of visible pairs."""
    bounds, key_bounds = [0, queries // 2 - 1, queries], [0, keys // 3, keys]
    seen = torch.zeros(queries, keys, dtype=torch.bool)
    for rows, columns in zip(pairwise(bounds), pairwise(key_bounds), strict=True):
        seen[slice(*rows), slice(*columns)] = True
    return mb.masks.Documents(bounds, key_cu_seqlens=key_bounds), seen


def leaves_of(tensors, rows, columns):
    q, k, v, dout = tensors
    own = [x[at].clone().requires_grad_() for x, at in ((q, rows), (k, columns), (v, columns))]
    return own, dout[rows]


def judge(name, got, wanted):
    error = oracle.worst(got, wanted)
    return [] if error < TOLERANCE else [f"{name} is off by {error:.2g}"]


class Longest:
    """Records the bytes of the longest message that this rank sends."""

    def __init__(self, monkey):
        self.bytes, exchange = 0, ProcessEndpoint.exchange

        def recorded(endpoint, channel, sends, receives, label):
            sizes = [send.flat.nbytes for send in sends if send.flat is not None]
            self.bytes = max(self.bytes, *sizes, 0)
            return exchange(endpoint, channel, sends, receives, label)

        monkey.setattr(ProcessEndpoint, "exchange", recorded)


def summed_bytes(groups, keys):
    """(intra, inter) bytes that a rank sends to sum dk and dv: two parts to each other rank."""
    part = -(-keys * KV_HEADS * (D + W) // groups.size) * 8
    nodes = [rank // groups.topology.per_node for rank in range(groups.size)]
    intra = nodes.count(nodes[groups.rank]) - 1
    return 2 * part * intra, 2 * part * (groups.size - 1 - intra)


def sent(groups):
    counted = groups.counters.intra, groups.counters.inter
    groups.counters.reset()
    return counted


def faults_of_attention(per_node, ulysses, algorithm):
    """Return what is wrong on this rank with all kinds of keys, two micro-batches in flight."""
    world, found = dist.get_world_size(), []
    groups = mb.Groups.from_topology(dist.group.WORLD, intra=per_node, ulysses=ulysses)
    rank = groups.rank
    for key_layout, key_rows in KEYS:
        places, keys = positions(key_layout, world, key_rows)
        rows = oracle.permutation("zigzag", world, ROWS * world)[rank]
        mask, seen = mask_of(ROWS * world, keys)
        batches = [whole(seed, world, keys) for seed in (1, 2)]
        own = [leaves_of(batch, rows, places[rank]) for batch in batches]
        plan = mb.prepare(
            *own[0][0], groups=groups, mask=mask, algorithm=algorithm, key_layout=key_layout
        )
        sent(groups)
        with pytest.MonkeyPatch.context() as monkey:
            longest = Longest(monkey)
            outs = [mb.attention(*leaves, plan=plan, label=i) for i, (leaves, _) in enumerate(own)]
            forward = sent(groups)
            for out, (_, dout) in zip(outs, own, strict=True):
                out.backward(dout)
            backward = sent(groups)
        name = f"{key_layout}, {per_node} per node, ulysses {ulysses}"
        for counted, traffic in zip((forward, backward), plan.traffic(), strict=True):
            if counted != (2 * traffic.intra, 2 * traffic.inter):
                found.append(f"{name}: sent {counted}, planned twice {traffic}")
        if replicated(key_layout):
            expected = summed_bytes(groups, keys) if key_layout != UNSUMMED else (0, 0)
            if forward != (0, 0) or backward != tuple(2 * n for n in expected):
                found.append(f"{name}: sent {forward}, {backward}, wanted twice {expected}")
            if plan.held_bytes:
                found.append(f"{name}: holds {plan.held_bytes} received bytes")
        if longest.bytes > plan.longest_message:
            found.append(f"{name}: {longest.bytes} in one message, not {plan.longest_message}")
        words = "all keys on every rank" if replicated(key_layout) else f"keys {key_layout}"
        if words not in plan.describe():
            found.append(f"{name}: described as {plan.describe()}")
        for out, (leaves, _), (q, k, v, dout) in zip(outs, own, batches, strict=True):
            wanted = oracle.attention(q, k, v, dout, seen)
            found += judge(f"{name}: out", out, wanted[0][rows])
            found += judge(f"{name}: dq", leaves[0].grad, wanted[2][rows])
            dk, dv = (x[places[rank]] for x in wanted[3:])
            if key_layout == UNSUMMED:
                *_, dk, dv = oracle.attention(q[rows], k, v, dout[rows], seen[rows])
            found += judge(f"{name}: dk", leaves[1].grad, dk)
            found += judge(f"{name}: dv", leaves[2].grad, dv)
    return found


@pytest.mark.parametrize(("world", "algorithm"), [(2, "all_gather"), (4, "burst")])
def test_numbers_and_bytes(ranks, world, algorithm):
    for per_node, ulysses in GRIDS[world]:
        results = ranks(world).run(faults_of_attention, per_node, ulysses, algorithm)
        assert results == [[]] * world


def faults_of_a_joint_call(per_node, ulysses, key_layouts):
    """Return what is wrong on this rank with one softmax over several sets of keys."""
    world, found = dist.get_world_size(), []
    groups = mb.Groups.from_topology(dist.group.WORLD, intra=per_node, ulysses=ulysses)
    rank = groups.rank
    rows = oracle.permutation("zigzag", world, ROWS * world)[rank]
    sink = torch.linspace(-1, 1, HEADS, dtype=torch.float64, requires_grad=True)
    sets, tables, wholes, at = [], [], [], []
    for number, (key_layout, key_rows) in enumerate(key_layouts):
        places, keys = positions(key_layout, world, key_rows)
        mask, seen = mask_of(ROWS * world, keys)
        (q, k, v), dout = leaves_of(whole(number, world, keys), rows, places[rank])
        sets.append((k, v, mask, key_layout))
        tables.append(seen)
        wholes.append(whole(number, world, keys)[1:3])
        at.append(places[rank])
    q_whole, *_, dout_whole = whole(0, world, 1)
    q, dout = q_whole[rows].requires_grad_(), dout_whole[rows]
    plans = [
        mb.prepare(q, k, v, groups=groups, mask=mask, key_layout=key_layout)
        for k, v, mask, key_layout in sets
    ]
    sent(groups)
    out = mb.joint_attention(
        q, [(k, v, plan) for (k, v, *_), plan in zip(sets, plans, strict=True)], sink=sink
    )
    forward = sent(groups)
    out.backward(dout)
    backward = sent(groups)
    k, v = (torch.cat(parts) for parts in zip(*wholes, strict=True))
    wanted = oracle.attention(q_whole, k, v, dout_whole, torch.cat(tables, 1), sink=sink)
    found += judge("out", out, wanted[0][rows])
    found += judge("dq", q.grad, wanted[2][rows])
    first = 0
    for (k, v, _, key_layout), (whole_k, _), rows_of in zip(sets, wholes, at, strict=True):
        dk, dv = (x[first : first + len(whole_k)][rows_of] for x in wanted[3:])
        found += judge(f"dk of {key_layout}", k.grad, dk)
        found += judge(f"dv of {key_layout}", v.grad, dv)
        first += len(whole_k)
    dsink = sink.grad.clone()
    dist.all_reduce(dsink)
    expected = oracle.sink_gradient(sink, wanted[1], wanted[0], dout_whole)
    found += judge("dsink", dsink, expected)
    # Ranks that share heads are in one node, and exchange queries once: q and out, or dout and dq.
    once = ROWS * HEADS * (D + W) * 8 * (ulysses - 1) // ulysses
    for way, counted in enumerate((forward, backward)):
        planned = [plan.traffic()[way] for plan in plans]
        intra = sum(t.intra for t in planned) - (len(plans) - 1) * once
        if counted != (intra, sum(t.inter for t in planned)):
            found.append(f"sent {counted}, planned {planned}")
    return found


@pytest.mark.parametrize("world", GRIDS)
def test_joint_calls(ranks, world):
    for per_node, ulysses in GRIDS[world]:
        own = [("contiguous", 2), ("striped", 7), ("contiguous", 1)]
        key_layouts = [own]
        if ulysses == 1:
            key_layouts += [[("replicated", 5), *own[:2]], [("replicated", 3), ("replicated", 5)]]
        for each in key_layouts:
            results = ranks(world).run(faults_of_a_joint_call, per_node, ulysses, each)
            assert results == [[]] * world, each


# --- ranks that differ ---------------------------------------------------------------------


def tensors(keys=4):
    """q, k and v of this rank, which need gradients."""
    make = torch.Generator().manual_seed(0)
    shapes = (ROWS, 1, HEADS, D), (keys, 1, KV_HEADS, D), (keys, 1, KV_HEADS, W)
    return [
        torch.randn(shape, generator=make, dtype=torch.float64).requires_grad_() for shape in shapes
    ]


FULL = {"mask": mb.masks.Full()}
DIFFERENT = {
    "layouts": ({"key_layout": "striped"}, "key_layout Striped.* rank 1 has key_layout Contiguous"),
    "one replicates": ({"key_layout": "replicated"}, r"rank 0 has key_layout Replicated\("),
    "one sums": (
        {"key_layout": mb.layout.Replicated(), "other": {"key_layout": UNSUMMED}},
        r"rank 0 has key_layout Replicated\(sum_gradients=True\)",
    ),
    "numbers of keys": ({"keys": 6}, r"rank 0 has k \(\(6, .*rank 1 has k \(\(4, "),
    "no keys on one rank": ({"keys": 0}, r"rank 0 has k \(\(0, .*rank 1 has k \(\(4, "),
    "no keys, and auto": (
        {"keys": 0, "algorithm": "auto", "other": {"algorithm": "auto"}},
        r"rank 0 has k \(\(0, .*rank 1 has k \(\(4, ",
    ),
    "one replicates, and auto": (
        {"key_layout": "replicated", "algorithm": "auto", "other": {"algorithm": "auto"}},
        r"rank 0 has key_layout Replicated.* 'burst', .* rank 1 has key_layout Contig.* 'auto'",
    ),
    "no mask on one rank": ({"mask": None}, "rank 0: mask: keys of another sequence"),
    "no key_layout on one rank": ({"key_layout": None}, "rank 0 has key_layout None"),
    "rows that do not fit": ({"keys": 3, "key_layout": "zigzag"}, "rank 0: k, v: 3 rows on each"),
    "another number of ranks": (
        {"key_layout": mb.layout.make("striped", cp_size=3)}, "rank 0: key_layout is for 3 ranks"
    ),
    "other documents": (
        {"key_layout": mb.layout.make("balanced", cp_size=2, cu_seqlens=[0, 6])},
        "rank 0: k, v: 4 rows on each of 2 ranks are 8 positions",
    ),
    "documents without keys": (
        {"keys": 0, "key_layout": mb.layout.make("balanced", cp_size=2, cu_seqlens=[0, 6])},
        "rank 0: k, v: 0 rows on each of 2 ranks are 0 positions",
    ),
    "a mask of other keys": (
        {"mask": mb.masks.Documents([0, 8], key_cu_seqlens=[0, 6])},
        "rank 0: key_cu_seqlens must end at the number of key positions, 8, got 6",
    ),
    "too few keys": ({"mask": mb.masks.Compressed(1), "keys": 2}, "rank 0: keys: 8 positions have"),
}  # fmt: skip


def refused(name):
    """Return the error of this rank for a plan for which rank 0 passes something else."""
    groups = mb.Groups.flat(dist.group.WORLD)
    choices = {"key_layout": "contiguous", **FULL}
    changed = dict(DIFFERENT[name][0])
    other = changed.pop("other", {})
    choices |= changed if groups.rank == 0 else other
    try:
        mb.prepare(*tensors(choices.pop("keys", 4)), groups=groups, **choices)
    except ValueError as error:
        mb.attention(*tensors(), groups=groups, key_layout="contiguous", **FULL)  # in step
        return str(error)
    return "served"


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_with_different_keys_get_one_error(ranks, name):
    messages = ranks(2).run(refused, name)
    assert len(set(messages)) == 1
    assert re.search(DIFFERENT[name][1], messages[0]), messages[0]


class Misstep:
    """Plans on which both ranks agreed, and calls in which rank 1 (`odd`) differs."""

    def __init__(self):
        dist.barrier()
        group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
        self.groups = mb.Groups.flat(group)
        self.odd = self.groups.rank == 1
        self.q, self.k, self.v = tensors()
        names = "contiguous", "striped", "replicated"
        self.plans = {
            name: mb.prepare(
                self.q, self.k, self.v, groups=self.groups, key_layout=name, kernel="reference",
                **FULL,
            )
            for name in names
        }  # fmt: skip

    def attention(self, name):
        mb.attention(self.q, self.k, self.v, plan=self.plans[name], label=1).sum().backward()

    def joint(self, names, label=1):
        sets = [(self.k, self.v, self.plans[name]) for name in names]
        mb.joint_attention(self.q, sets, label=label).sum().backward()

    def another_plan(self):
        self.attention("striped" if self.odd else "contiguous")

    def replicated_on_one(self):
        self.attention("replicated" if self.odd else "contiguous")

    def another_order(self):
        names = ["contiguous", "striped"]
        self.joint(names[::-1] if self.odd else names)

    def another_order_with_replicated_keys(self):
        names = ["replicated", "striped"]
        self.joint(names[::-1] if self.odd else names)

    def fewer_sets(self):
        self.joint(["contiguous"] if self.odd else ["contiguous", "striped"])

    def a_joint_call_on_one(self):
        if self.odd:
            self.joint(["contiguous"], label=2)
        else:
            self.attention("contiguous")

    def another_label(self):
        self.joint(["contiguous", "striped"], label=1 + self.odd)

    def other_backwards_of_replicated_keys(self):
        leaves = [self.q, self.k, self.v]
        outs = [mb.attention(*leaves, plan=self.plans["replicated"], label=i) for i in range(2)]
        for out in outs[::-1] if self.odd else outs:
            out.sum().backward(retain_graph=True)

    def other_backwards_of_joint_calls(self):
        sets = [(self.k, self.v, self.plans[name]) for name in ("replicated", "striped")]
        outs = [mb.joint_attention(self.q, sets, label=i) for i in range(2)]
        for out in outs[::-1] if self.odd else outs:
            out.sum().backward(retain_graph=True)


def missteps():
    return [name for name in vars(Misstep) if not name.startswith("_") and name not in
            ("attention", "joint")]  # fmt: skip


def error_of(name):
    """Return the error of this rank."""
    try:
        getattr(Misstep(), name)()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("name", missteps())
def test_ranks_out_of_step_get_an_error(ranks, name):
    errors = ranks(2).run(error_of, name, timeout=30)
    assert all(error.startswith("RuntimeError: exchange failed") for error in errors), errors
    if name != "replicated_on_one":  # where each waits for messages on another channel
        assert any("plan" in error or "message" in error or "label" in error for error in errors)

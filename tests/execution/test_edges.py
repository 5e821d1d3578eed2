"""Unusual calls: rows and ranks without visible keys, frozen inputs, failures, low precision.

`test_every.py` draws strides, repeated backwards and calls in flight.
"""

from collections import namedtuple
from dataclasses import dataclass
from itertools import product

import cases
import numpy as np
import oracle
import pytest
import torch

import megatron_burst as mb
from megatron_burst.masks import Cover, Mask
from megatron_burst.plugins.testing import in_process

NAMES = ("out", "dq", "dk", "dv")
CAUSAL = cases.Problem("causal", (4, 2), 2, (5, 3), 24)
HERE = cases.Case(2, 2, "burst", "zigzag", "kv", "aten", CAUSAL)


@dataclass(frozen=True)
class Gap(Mask):
    """The second quarter of the queries sees nothing; the third quarter of the keys is hidden."""

    length: int

    def visible(self, q, k):
        return (4 * q // self.length != 1) & (4 * k // self.length != 2)

    def cover(self, q_span, k_span):
        seen = self.visible(q_span.positions()[:, None], k_span.positions()[None, :])
        return Cover.FULL if seen.all() else Cover.PARTIAL if seen.any() else Cover.EMPTY


Call = namedtuple("Call", "case groups tensors douts")  # tensors: 3 lists, one entry per rank


def call(case, needs=(True, True, True), dtype=None):
    """Return the inputs of a case on an in-process grid, as leaves."""
    shards = cases.shards(case, cases.solve(case.problem)[0])
    *tensors, douts = ([x.to(dtype or x.dtype) for x in xs] for xs in zip(*shards, strict=True))
    for xs, need in zip(tensors, needs, strict=True):
        for x in xs:
            x.requires_grad_(need)
    groups = in_process.groups(inter=case.nodes, intra=case.per_node)
    return Call(case, groups, tensors, douts)


def attend(c, **more):
    return in_process.attention(*c.tensors, groups=c.groups, **{**cases.choices(c.case), **more})


def grads(outs, c, **more):
    """Return gradients of all leaves that need one: [per tensor kind][per rank]."""
    leaves = [x for xs in c.tensors for x in xs if x.requires_grad]
    flat = torch.autograd.grad(outs, leaves, c.douts, **more)
    return [flat[i : i + c.groups.size] for i in range(0, len(flat), c.groups.size)]


def assert_truth(c, outs, gradients, names=NAMES, tolerance=cases.TOLERANCE):
    """Compare `outs` and `gradients` with the oracle, rank by rank."""
    truth = dict(zip(NAMES, cases.solve(c.case.problem)[1], strict=True))
    for name, parts in zip(names, [outs, *gradients], strict=True):
        for rank, part in enumerate(parts):
            wanted = cases.shards(c.case, [truth[name]])[rank][0]
            assert oracle.worst(part, wanted) <= tolerance, (name, rank)


# --- who sees nothing ----------------------------------------------------------------------


@pytest.mark.parametrize("side", cases.SIDES)
@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("algorithm", cases.ALGORITHMS)
@pytest.mark.parametrize("grid", [(1, 1), (1, 4), (2, 2)])
def test_rows_and_whole_ranks_that_see_nothing(grid, algorithm, layout, side):
    """With contiguous shards, rank 1 of four sees nothing, and no rank sees the keys of rank 2."""
    problem = cases.Problem("gap", (4, 2), 2, (5, 3), 24)
    case = cases.Case(*grid, algorithm, layout, side, "reference", problem)
    c = call(case)
    outs = attend(c, mask=Gap(24))
    gradients = grads(outs, c)
    assert_truth(c, outs, gradients)
    blind = [[6 <= p < 12 for p in ps] for ps in oracle.permutation(layout, case.size, 24)]
    for out, dq, rows in zip(outs, gradients[0], blind, strict=True):
        assert not out[torch.tensor(rows)].any()
        assert not dq[torch.tensor(rows)].any()


def test_a_mask_that_hides_everything_gives_zeros():
    class Nothing(Mask):
        def visible(self, q, k):
            return np.zeros(np.broadcast_shapes(q.shape, k.shape), dtype=bool)

        def cover(self, q_span, k_span):
            return Cover.EMPTY

    for kernel, side in product(("reference", "aten"), cases.SIDES):
        c = call(HERE._replace(kernel=kernel, side=side))
        outs = attend(c, mask=Nothing())
        assert not any(x.any() for xs in [outs, *grads(outs, c)] for x in xs)


# --- frozen inputs -------------------------------------------------------------------------

FROZEN = [needs for needs in product((True, False), repeat=3) if any(needs)]


@pytest.mark.parametrize("side", cases.SIDES)
@pytest.mark.parametrize("needs", FROZEN, ids=str)
@pytest.mark.parametrize("kernel", ["reference", "aten"])
def test_frozen_inputs_get_no_gradient_and_send_none(kernel, needs, side):
    problem = CAUSAL._replace(mask="full")  # every row travels to everyone
    c = call(HERE._replace(kernel=kernel, side=side, problem=problem), needs)
    outs = attend(c)
    before = c.groups.counters.intra
    names = ["out", *(n for n, need in zip(NAMES[1:], needs, strict=True) if need)]
    assert_truth(c, outs, grads(outs, c), names)
    (h, k), (d, w), rows = CAUSAL.heads, CAUSAL.widths, 12
    widths = {"kv": k * (d * needs[1] + w * needs[2]), "query": h * d * needs[0]}
    chunk = oracle.activation_bytes(side, rows, h, k, d, w, 8, 8) + rows * widths[side] * 8
    assert c.groups.counters.intra - before == 2 * chunk


def test_a_plan_may_foresee_gradients_that_a_call_does_not_need():
    c = call(HERE, (True, False, True))
    plan = in_process.prepare(*c.tensors, groups=c.groups, needs_grad=(True, True, True))
    outs = in_process.attention(*c.tensors, plan=plan)
    assert_truth(c, outs, grads(outs, c), ("out", "dq", "dv"))


def test_inputs_that_need_no_gradient_make_no_graph():
    c = call(HERE, (False, False, False))
    outs = attend(c)
    assert not any(out.requires_grad for out in outs)
    assert_truth(c, outs, [], ("out",))


def test_no_grad_computes_and_keeps_nothing():
    c = call(HERE)
    with torch.no_grad():
        outs = attend(c)
        plan = in_process.prepare(*c.tensors, groups=c.groups, needs_grad=(False, False, False))
        again = in_process.attention(*c.tensors, plan=plan)
    assert not any(out.requires_grad for out in outs)
    assert_truth(c, outs, [], ("out",))
    assert_truth(c, again, [], ("out",))


def test_inference_mode_works_too():
    """Tensors made in inference mode have no version counter."""
    with torch.inference_mode():
        c = call(HERE, (False, False, False))
        outs = attend(c)
    assert_truth(c, outs, [], ("out",))


@pytest.mark.parametrize("kernel", ["reference", "aten"])
def test_autocast_does_not_reach_inside(kernel):
    """bf16 matrix products would leave attention of fp32 tensors with bf16's errors."""
    problem = CAUSAL._replace(dtype=torch.float32)
    c = call(HERE._replace(kernel=kernel, problem=problem))
    outs = attend(c)
    gradients = grads(outs, c)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = attend(c)
        for got, right in zip([again, *grads(again, c)], [outs, *gradients], strict=True):
            assert all(map(torch.equal, got, right))


# --- calls that fail -----------------------------------------------------------------------


@pytest.mark.parametrize("count", range(16))
@pytest.mark.parametrize("method", ["forward", "backward"])
def test_a_call_that_failed_half_way_leaves_nothing_to_the_next(method, count):
    c = call(HERE)
    plan = in_process.prepare(*c.tensors, groups=c.groups, side="kv")
    with pytest.raises(MemoryError):
        grads(
            in_process.attention(
                *c.tensors, plan=plan.with_kernel(cases.Failing(plan.kernel, method, count))
            ),
            c,
        )
    outs = in_process.attention(*c.tensors, plan=plan)
    assert_truth(c, outs, grads(outs, c))


# --- autograd ------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", ["q", "k", "v", "out"])
def test_what_was_changed_in_place_before_backward_is_noticed(victim):
    c = call(HERE)
    outs = attend(c)
    changed = {**dict(zip("qkv", c.tensors, strict=True)), "out": outs}[victim][0]
    with torch.no_grad():
        changed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        grads(outs, c)


# --- precision -----------------------------------------------------------------------------


@pytest.mark.parametrize("side", cases.SIDES)
@pytest.mark.parametrize("algorithm", cases.ALGORITHMS)
def test_gradients_may_travel_in_bf16_at_a_bounded_error(algorithm, side, record_property):
    """Half the gradient bytes; each of the three hops rounds a sum once, to 2^-9 of its size."""
    problem = cases.Problem("causal", (4, 4), 1, (32, 32), 96, torch.float32)
    case = cases.Case(1, 4, algorithm, "zigzag", side, "aten", problem)
    exact, full = cases.run_in_process(case)
    rounded, half = cases.run_in_process(case, grad_wire_dtype=torch.bfloat16)
    travels = {"kv": (2, 3), "query": (1,)}[side]
    for i, name in enumerate(NAMES):
        size = max(x[i].abs().max().item() for x in exact)
        error = max(oracle.worst(x[i], y[i]) for x, y in zip(rounded, exact, strict=True))
        record_property(f"{name} error of bf16 on the wire, of its largest entry", error / size)
        if i in travels:
            assert 2**-12 * size < error < 3 * 2**-8 * size
        else:  # with other bytes the ring may go round the other way: another order of sums
            assert error < 1e-6 * size
    for rank in range(4):
        assert full[rank].intra == cases.expected_bytes(case, rank, wire=4)[0]
        assert half[rank].intra == cases.expected_bytes(case, rank, wire=2)[0]


@pytest.mark.parametrize("wire", [torch.float16, torch.float32, torch.float64])
def test_other_wire_dtypes_count_what_they_send(wire):
    case = HERE._replace(problem=CAUSAL._replace(dtype=torch.float32))
    _, counters = cases.run_in_process(case, grad_wire_dtype=wire)
    for rank, counter in enumerate(counters):
        wanted = cases.expected_bytes(case, rank, wire=wire.itemsize)
        assert (counter.intra, counter.inter) == wanted


# --- plans ---------------------------------------------------------------------------------


def test_a_plan_can_be_made_from_shapes_alone():
    """Empty tensors suffice, because only shapes are read."""
    c = call(HERE)
    hollow = [[torch.full_like(x, float("nan")) for x in xs] for xs in c.tensors]
    plan = in_process.prepare(*hollow, groups=c.groups, needs_grad=(True, True, True))
    outs = in_process.attention(*c.tensors, plan=plan)
    assert_truth(c, outs, grads(outs, c))


@pytest.mark.parametrize(
    ("heads", "side"), [((4, 4), "query"), ((4, 2), "kv"), ((4, 1), "kv")], ids=str
)
def test_auto_takes_the_side_with_fewer_bytes_and_says_so(heads, side):
    problem = cases.Problem("causal", heads, 1, (16, 16), 16, torch.bfloat16)
    c = call(HERE._replace(problem=problem))
    plan = in_process.prepare(*c.tensors, groups=c.groups)
    sent = {name: plan.traffic(name)[1].total for name in cases.SIDES}
    assert min(sent, key=sent.get) == plan.side == side
    line = plan.describe()
    for words in ("burst", "2 per node x 2 nodes", f"side {side}", "layout zigzag", "kernel aten"):
        assert words in line
    assert "\n" not in line


def test_the_line_says_bytes_by_hand():
    """bf16, 4 rows, 4 and 2 heads of 16: K, V are 512 B per hop, with fp32 gradients 1536 B.

    The other side, Q, dO, lse, delta, dQ, is 2176 B. Two hops are within the node, one between
    nodes.
    """
    problem = cases.Problem("full", (4, 2), 1, (16, 16), 16, torch.bfloat16)
    c = call(HERE._replace(problem=problem))
    line = in_process.prepare(*c.tensors, groups=c.groups, mask=mb.masks.Full()).describe()
    assert "forward 1 KiB intra + 512 B inter" in line
    assert "backward 3 KiB intra + 1.5 KiB inter" in line
    assert "side query would send 4.25 KiB intra + 2.125 KiB inter" in line


def test_gradients_and_activations_never_share_a_communicator():
    """The authors of BurstEngine found wrong results if they do."""
    c = call(HERE)
    seen = set()
    for endpoint in (rank.ring for rank in c.groups.ranks):
        real = endpoint.exchange

        def spy(channel, sends, receives, label, real=real):
            seen.add((channel.ring, channel.gradient, "dkv of rank" in str(label)))
            return real(channel, sends, receives, label)

        endpoint.exchange = spy
    grads(attend(c), c)
    assert seen == {(ring, kind, kind) for ring in ("intra", "inter") for kind in (False, True)}

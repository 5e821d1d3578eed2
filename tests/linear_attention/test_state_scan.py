"""State scan in one process: every algorithm, layout, size and form against dense maps."""

import nccl_rules
import pytest
import torch
from state_chains import GRIDS, LAYOUTS, documents, pieces, serial

from megatron_burst.linear_attention import plan
from megatron_burst.plugins.testing import in_process

ALGORITHMS = ("all_gather", "scan", "two_level", "ring")
FORMS = ("none", "scalar", "vector", "matrix")
B, H, D, W = 2, 2, 2, 4
BEYOND = {"scalar": (), "vector": (D,), "matrix": (D, D)}


class Problem:
    """Random maps of all pieces of a sequence; gradients flow to `leaves`."""

    def __init__(self, layout, world, packed, form, seed=0):
        make = torch.Generator().manual_seed(seed)
        self.bounds = documents(layout, world, packed)
        self.layout = LAYOUTS[layout](world, self.bounds)
        self.seq_len, self.world = self.bounds[-1], world
        self.chain = pieces(self.layout, self.seq_len, self.bounds)

        def random(*shape):
            return torch.randn(*shape, generator=make, dtype=torch.float64).requires_grad_()

        count = len(self.chain)
        self.increments = [random(B, H, D, W) for _ in range(count)]
        beyond = BEYOND.get(form)
        self.decays = [None if beyond is None else random(B, H, *beyond) for _ in range(count)]
        self.initial = random(len(self.bounds) - 1, B, H, D, W)
        self.leaves = [*self.increments, self.initial, *(t for t in self.decays if t is not None)]
        self.weights = [
            torch.randn(B, H, D, W, generator=make, dtype=torch.float64) for _ in range(count)
        ]
        shape = world, *self.initial.shape
        self.final_weights = torch.randn(shape, generator=make, dtype=torch.float64)

    def of_rank(self, tensors, rank):
        """Return one tensor of this rank's pieces in row order."""
        own = sorted((p.nth, i) for i, p in enumerate(self.chain) if p.rank == rank)
        some = [tensors[i] for _, i in own]
        if not some or some[0] is None:
            return None if tensors[0] is None else tensors[0].new_zeros(0, *tensors[0].shape)
        return torch.stack(some)

    def shards(self, tensors):
        shards = [self.of_rank(tensors, rank) for rank in range(self.world)]
        return None if shards[0] is None else shards

    def expected(self, final):
        """Return entering states, final states, and gradients of the leaves."""
        entering, finals = serial(self.chain, self.decays, self.increments, self.initial)
        loss = sum((e * w).sum() for e, w in zip(entering, self.weights, strict=True))
        if final:
            loss = loss + (finals * self.final_weights).sum()
        return entering, finals, torch.autograd.grad(loss, self.leaves, allow_unused=True)

    def check(self, groups, algorithm, final=True):
        entering, finals, grads = self.expected(final)
        found = in_process.state_scan(
            self.shards(self.decays), self.shards(self.increments), groups=groups,
            layout=self.layout, seq_len=self.seq_len, cu_seqlens=self.bounds,
            initial_state=self.initial, return_final_state=final, algorithm=algorithm,
        )  # fmt: skip
        states, ends = found if final else (found, [])
        for state, wanted in zip(states, self.shards(entering), strict=True):
            close(state, wanted)
        for end in ends:
            close(end, finals)
        weighted = zip([*states, *ends], [*self.shards(self.weights), *self.final_weights])  # noqa: B905
        loss = sum((t * w).sum() for t, w in weighted)
        own = torch.autograd.grad(loss, self.leaves, allow_unused=True)
        for one, other in zip(own, grads, strict=True):
            if other is not None or one is not None:
                close(one, torch.zeros_like(one) if other is None else other)


def in_blocks(monkeypatch, algorithm, world):
    """Split states into more blocks than their size requires: heads, columns and rows."""
    if algorithm in ("scan", "two_level") and world > 1:

        def number(groups, sequence, sizes, *remaining):
            return 8 if sizes.form == "matrix" else 16

        monkeypatch.setattr(plan, "choice_of", number)


def close(found, wanted):
    torch.testing.assert_close(found, wanted, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("world", GRIDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_states_and_gradients(layout, world, algorithm, monkeypatch):
    """Every three of layout, size, algorithm and form occur together."""
    inter, intra = GRIDS[world]
    in_blocks(monkeypatch, algorithm, world)
    cases = [*((True, form) for form in FORMS), (False, "matrix")]
    number = [*LAYOUTS].index(layout) + [*GRIDS].index(world) + ALGORITHMS.index(algorithm)
    for packed, form in cases[number % 2 :: 2]:
        groups = in_process.groups(inter=inter, intra=intra)
        Problem(layout, world, packed, form).check(groups, algorithm)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_without_final_states_and_with_shared_heads(algorithm):
    groups = in_process.groups(inter=2, intra=2, ulysses=2)
    traces = nccl_rules.record(groups)
    for form in FORMS:
        Problem("zigzag", 4, True, form).check(groups, algorithm, final=False)
    for communicator in nccl_rules.COMMUNICATORS.values():
        assert not nccl_rules.faults(traces, communicator(groups.topology))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_are_those_of_the_formula(layout, algorithm):
    """Counted bytes equal the plan; no states are sent if no document crosses ranks."""
    groups = in_process.groups(inter=2, intra=2)
    problem = Problem(layout, 4, True, "matrix")
    increments, decays = problem.shards(problem.increments), problem.shards(problem.decays)
    q = torch.zeros(problem.seq_len // 4, B, H, D, dtype=torch.float64)
    v, beta = q.new_zeros(*q.shape[:3], W), q.new_zeros(q.shape[:3])
    each = ([t] * 4 for t in (q, q, v))
    plan = in_process.prepare_linear(
        *each, beta=[beta] * 4, groups=groups, layout=problem.layout,
        cu_seqlens=problem.bounds, algorithm=algorithm,
    )  # fmt: skip
    states = in_process.state_scan(decays, increments, plan=plan)
    there = [(r.counters.intra, r.counters.inter) for r in groups.ranks]
    assert there == [one.traffic()[0] for one in plan.ranks]
    torch.autograd.grad(sum(t.sum() for t in states), problem.increments, allow_unused=True)
    both = [(r.counters.intra, r.counters.inter) for r in groups.ranks]
    back = [one.traffic()[1] for one in plan.ranks]
    assert both == [(a + c, b + d) for (a, b), (c, d) in zip(there, back, strict=True)]
    assert sum(map(sum, both)) > 0
    assert f"algorithm {algorithm} | 2 per node x 2 nodes" in plan.describe()


def test_frozen_and_strided_inputs():
    """Frozen inputs get no gradient, and rows and heads may have any strides."""
    groups = in_process.groups(intra=2)
    problem = Problem("zigzag", 2, False, "vector")
    entering, _, grads = problem.expected(final=False)
    spread = [t.mT.contiguous().mT for t in problem.shards(problem.increments)]
    frozen = [t.detach() for t in problem.shards(problem.decays)]
    states = in_process.state_scan(
        frozen, spread, groups=groups, layout=problem.layout, seq_len=problem.seq_len,
        initial_state=problem.initial.detach(),
    )  # fmt: skip
    for state, wanted in zip(states, problem.shards(entering), strict=True):
        close(state, wanted)
    loss = sum((t * w).sum() for t, w in zip(states, problem.shards(problem.weights), strict=True))
    own = torch.autograd.grad(loss, problem.increments, allow_unused=True)
    none = torch.zeros(B, H, D, W, dtype=torch.float64)
    for one, other in zip(own, grads[: len(own)], strict=True):
        close(none if one is None else one, none if other is None else other)


def of_zigzag(dtype=torch.float32):
    """Return increments of two zigzag ranks: two pieces of rank 0, and one of rank 1."""
    return [torch.ones(p, 1, 1, 2, 2, dtype=dtype, requires_grad=True) for p in (2, 1)]


def test_states_of_bfloat16_travel_in_float32():
    groups = in_process.groups(intra=2)
    first, turn = of_zigzag(torch.bfloat16)
    with torch.no_grad():
        turn.fill_(2.0**-9)
    states = in_process.state_scan(None, [first, turn], groups=groups, seq_len=8)
    assert all(state.dtype == torch.float32 for state in states)
    assert states[0][1].min() == 1 + 2.0**-9
    states[0].sum().backward()
    assert turn.grad.dtype == torch.bfloat16
    assert turn.grad.min() == 1


def test_a_second_derivative_is_refused():
    groups = in_process.groups(intra=2)
    increments = of_zigzag()
    states = in_process.state_scan(None, increments, groups=groups, seq_len=8)
    with pytest.raises(RuntimeError, match=r"mb.state_scan cannot be differentiated twice"):
        torch.autograd.grad(states[1].sum(), increments, create_graph=True, allow_unused=True)

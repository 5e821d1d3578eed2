"""Linear attention over ranks that share a process, end to end against the recurrence by hand."""

from itertools import pairwise

import pytest
import recurrences
import torch
from state_chains import GRIDS, LAYOUTS, documents

import megatron_burst as mb
from megatron_burst.plugins.testing import in_process

ALGORITHMS = ("all_gather", "scan", "two_level", "ring", "auto")
FORMS = {  # name -> decay's letters, is there a beta?
    "linear": (None, False),
    "scalar_decay": ("sbh", False),
    "lightning": ("h", False),
    "vector_decay": ("sbhd", False),
    "delta_rule": (None, True),
    "gated_delta_rule": ("sbh", True),
    "kda": ("sbhd", True),
}
SIZES = {"b": 2, "g": 1, "h": 2, "d": 3, "w": 4}


def random(letters, rows, make):
    shape = [rows if letter == "s" else SIZES[letter] for letter in letters]
    return torch.randn(shape, generator=make, dtype=torch.float64)


def problem(form, bounds, seed=0):
    """Return q, k, v, decay, beta and initial states of a whole sequence."""
    make = torch.Generator().manual_seed(seed)
    rows = bounds[-1]
    letters, delta = FORMS[form]
    q, k, v = random("sbgd", rows, make), random("sbgd", rows, make) / 2, random("sbhw", rows, make)
    decay = None if letters is None else -random(letters, rows, make).abs()
    beta = random("sbh", rows, make).sigmoid() if delta else None
    initial = torch.stack([random("bhdw", 0, make) for _ in bounds[1:]])
    return [None if t is None else t.requires_grad_() for t in (q, k, v, decay, beta, initial)]


def recurrence(q, k, v, decay, beta, initial, bounds):
    """Compute outputs [s, b, h, w] and final states token by token."""
    if decay is not None and decay.dim() == 1:  # one for all tokens
        decay = decay.expand(*v.shape[:3])
    lengths = [stop - start for start, stop in pairwise(bounds)]
    arguments = recurrences.Case(q, k, v, decay, beta)
    return recurrences.pieces(arguments, lengths, initial, q.shape[3] ** -0.5)


def close(found, wanted):
    torch.testing.assert_close(found, wanted, atol=1e-10, rtol=1e-10)


def check(form, layout, world, algorithm, kernel="auto", planned=False):
    bounds = documents(layout, world, packed=True)
    cut = LAYOUTS[layout](world, bounds)
    tensors = problem(form, bounds)
    *whole, initial = tensors
    out, finals = recurrence(*tensors, bounds)
    inter, intra = GRIDS[world]
    groups = in_process.groups(inter=inter, intra=intra)

    def shards(x):
        if x is None or x.dim() == 1:
            return x
        return [mb.shard(x, cut, rank, dim=0) for rank in range(world)]

    q, k, v, decay, beta = map(shards, whole)
    keywords = {"groups": groups, "layout": cut, "cu_seqlens": bounds, "algorithm": algorithm,
                "kernel": kernel}  # fmt: skip
    if planned:
        every = [decay] * world if isinstance(decay, torch.Tensor) else decay
        keywords = {"plan": in_process.prepare_linear(q, k, v, decay=every, beta=beta, **keywords)}
    own, ends = in_process.linear_attention(
        q, k, v, decay=decay, beta=beta, initial_state=initial, return_final_state=True, **keywords
    )
    own = mb.unshard(own, cut, dim=0)
    close(own, out)
    for end in ends:
        close(end, finals)
    make = torch.Generator().manual_seed(1)
    of_out, of_finals = (torch.randn(t.shape, generator=make).double() for t in (out, finals))
    leaves = [t for t in tensors if t is not None]
    truth = torch.autograd.grad((out * of_out).sum() + (finals * of_finals).sum(), leaves)
    # The gradient of the final states comes in parts, from all ranks.
    parts = sum((end * of_finals).sum() for end in ends) / world
    for one, other in zip(
        torch.autograd.grad((own * of_out).sum() + parts, leaves), truth, strict=True
    ):
        close(one, other)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_and_algorithm(form, algorithm):
    check(form, "zigzag", 4, algorithm)


@pytest.mark.parametrize("world", GRIDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_and_world(layout, world):
    check("gated_delta_rule", layout, world, "auto", planned=True)


@pytest.mark.slow
@pytest.mark.parametrize("world", GRIDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("form", FORMS)
def test_everything(form, algorithm, layout, world):
    check(form, layout, world, algorithm)


@pytest.mark.parametrize("form", FORMS)
def test_the_reference_kernel(form):
    check(form, "contiguous", 2, "auto", "reference", planned=True)


def bf16_error(form, world):
    """Return the largest errors of out and of the gradient of v in bfloat16."""
    bounds = [0, 256]
    tensors = problem(form, bounds)
    *whole, _ = tensors
    initial = torch.zeros_like(tensors[-1])
    low = [None if t is None else t.detach().to(torch.bfloat16) for t in whole]
    exact = [None if t is None else t.double().requires_grad_() for t in low]
    out, _ = recurrence(*exact, initial, bounds)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).double()
    (truth,) = torch.autograd.grad((out * weights).sum(), exact[2])
    layout = mb.layout.make("zigzag", cp_size=world)
    groups = in_process.groups(intra=world)
    v = low[2].requires_grad_()
    q, k, v_, decay, beta = (
        None if t is None else [mb.shard(t, layout, r, dim=0) for r in range(world)]
        for t in (*low[:2], v, *low[3:])
    )
    own = in_process.linear_attention(
        q, k, v_, decay=decay, beta=beta, groups=groups, layout=layout
    )
    own = mb.unshard(own, layout, dim=0)
    (grad,) = torch.autograd.grad((own * weights.to(own.dtype)).sum(), v)
    return (own - out).abs().mean().item(), (grad - truth).abs().mean().item()


@pytest.mark.parametrize("form", ["scalar_decay", "gated_delta_rule", "kda"])
def test_bfloat16_over_ranks_is_as_exact_as_on_one(form):
    for over_ranks, alone in zip(bf16_error(form, 4), bf16_error(form, 1), strict=True):
        assert 0 < over_ranks <= 2 * alone


def test_without_gradients_and_with_one_decay_for_all():
    groups = in_process.groups(intra=2)
    q = [torch.randn(4, 1, 2, 3) for _ in range(2)]
    plan = in_process.prepare_linear(q, q, q, decay=[-torch.ones(2)] * 2, groups=groups)
    with torch.no_grad():
        out = in_process.linear_attention(q, q, q, decay=-torch.ones(2), plan=plan)
    assert [t.shape for t in out] == [(4, 1, 2, 3)] * 2
    assert "form scalar_decay" in plan.describe()
    assert "bytes per layer of rank" in plan.describe()

"""Second derivatives and function transforms of the LM head: refused, never dropped."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import megatron_burst as mb

MODES = ["single_pass", "recompute"]


def head(mode):
    """(loss as a function of hidden, hidden, weight)."""
    make = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 4, generator=make, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 4, generator=make, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 7, (5,), generator=make)
    return lambda h: mb.linear_cross_entropy(h, weight, labels, mode=mode), hidden, weight


@pytest.mark.parametrize("mode", MODES)
def test_a_graph_of_the_backward_is_refused(mode):
    loss, hidden, _ = head(mode)
    with pytest.raises(RuntimeError, match=r"^linear_cross_entropy cannot be .*create_graph=True"):
        torch.autograd.grad(loss(hidden).sum(), hidden, create_graph=True)


@pytest.mark.parametrize("mode", MODES)
def test_a_backward_that_is_retained_runs_twice(mode):
    loss, hidden, _ = head(mode)
    total = loss(hidden).sum()
    first = torch.autograd.grad(total, hidden, retain_graph=True)[0].clone()
    assert torch.equal(torch.autograd.grad(total, hidden)[0], first)
    assert first.any()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_inside_a_checkpoint(mode, reentrant):
    loss, hidden, weight = head(mode)
    truth = torch.autograd.grad(loss(hidden).sum(), [hidden, weight])
    checkpoint(loss, hidden, use_reentrant=reentrant).sum().backward()
    assert torch.equal(hidden.grad, truth[0])
    assert torch.equal(weight.grad, truth[1])


TRANSFORMS = {
    "grad": lambda loss, x: torch.func.grad(lambda h: loss(h).sum())(x),
    "jacrev": lambda loss, x: torch.func.jacrev(loss)(x),
    "jvp": lambda loss, x: torch.func.jvp(loss, (x,), (x,)),
    "vmap": lambda loss, x: torch.func.vmap(loss)(x[None]),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_function_transforms_are_refused(transform):
    loss, hidden, _ = head("single_pass")
    with pytest.raises(ValueError, match=r"^linear_cross_entropy cannot run inside torch.func"):
        TRANSFORMS[transform](loss, hidden.detach())

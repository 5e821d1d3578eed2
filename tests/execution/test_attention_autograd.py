"""Attention with torch's own tools: second derivatives, torch.func, torch.compile."""

import pytest
import torch

import megatron_burst as mb

GROUPS = mb.Groups.single()


def attend(q, k, v, **more):
    return mb.attention(q, k, v, groups=GROUPS, **more)


def qkv():
    torch.manual_seed(1)
    return [torch.randn(8, 1, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def test_a_second_derivative_is_refused():
    """Also if the incoming gradient does not require one: out.sum() sends a constant."""
    tensors = qkv()
    loss = attend(*tensors).sum()
    with pytest.raises(RuntimeError, match=r"mb.attention cannot be differentiated twice.*create_"):
        torch.autograd.grad(loss, tensors, create_graph=True)


def test_backward_twice_over_one_graph_is_no_second_derivative():
    tensors = qkv()
    loss = attend(*tensors).square().sum()
    first = torch.autograd.grad(loss, tensors, retain_graph=True)
    second = torch.autograd.grad(loss, tensors)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_torchs_own_checkpoint_runs_it(reentrant):
    """Its recomputation runs with gradients enabled inside a backward."""
    from torch.utils.checkpoint import checkpoint

    tensors, calls = qkv(), []
    plain = torch.autograd.grad(attend(*tensors).square().sum(), tensors)

    def counted(*shard):
        calls.append(1)
        return attend(*shard)

    out = checkpoint(counted, *tensors, use_reentrant=reentrant)
    out.square().sum().backward()
    assert len(calls) == 2
    for tensor, grad in zip(tensors, plain, strict=True):
        torch.testing.assert_close(tensor.grad, grad, rtol=0, atol=1e-12)


def test_functional_transforms_are_refused():
    q, k, v = qkv()
    groups = mb.Groups.single()
    gradient = torch.func.grad(lambda q: mb.attention(q, k, v, groups=groups).sum())
    with pytest.raises(ValueError, match=r"mb.attention cannot run inside torch.func"):
        gradient(q)


def test_compile_breaks_its_graph_once():
    """Two graphs, before and after; the call itself is never compiled."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def model(q, k, v):
        return (attend(q * 2, k, v) * 3).sum()

    compiled = torch.compile(model, backend=backend)
    for _ in range(3):
        tensors = qkv()
        assert compiled(*tensors).item() == model(*tensors).item()
        compiled(*tensors).backward()
    assert len(graphs) == 2
    with pytest.raises(torch._dynamo.exc.Unsupported, match="attention"):
        torch.compile(lambda *x: model(*x), backend=backend, fullgraph=True)(*qkv())

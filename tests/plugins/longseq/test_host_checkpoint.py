"""`mb.checkpoint(offload=)`: equal bits, bytes by formula, and no leftovers after any step."""

import importlib
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import megatron_burst as mb
from megatron_burst.plugins.longseq.host.arena import OutOfHostMemory
from megatron_burst.plugins.testing import in_process

ROWS, BATCH, WIDTH, LAYERS = 24, 2, 8, 3


def memory(**given):
    return mb.HostMemory(2**22, strict=True, device="cpu", **given)


def model(keep):
    """Return layers of attention on one rank and an MLP, for checkpoints that `keep`."""
    plan = mb.prepare(
        shape=(ROWS, BATCH, 2, 4), groups=mb.Groups.single(), layout="striped", store=keep or None
    )
    torch.manual_seed(0)
    weights = [
        [nn.Parameter(0.3 * torch.randn(WIDTH, 3 * WIDTH)), nn.Parameter(torch.randn(WIDTH, WIDTH))]
        for _ in range(LAYERS)
    ]

    def layer(x, weights):
        q, k, v = (x @ weights[0]).view(ROWS, BATCH, 2, 12).split(4, -1)
        out = mb.attention(q, k, v, plan=plan)
        x = x + out.reshape(ROWS, BATCH, WIDTH)
        return x + (x @ weights[1]).tanh()

    return layer, weights


def gradients(layer, weights, run, times=1):
    """Return the gradients of a micro-batch, repeated `times`."""
    x = torch.linspace(-1, 1, ROWS * BATCH * WIDTH).view(ROWS, BATCH, WIDTH).requires_grad_()
    h = x.sin()
    for pair in weights:
        h = run(layer, h, pair)
    wanted, loss = [x, *(w for pair in weights for w in pair)], h.square().sum()
    found = [torch.autograd.grad(loss, wanted, retain_graph=True) for _ in range(times - 1)]
    found.append(torch.autograd.grad(loss, wanted))
    assert all(torch.equal(a, b) for grads in found for a, b in zip(grads, found[0], strict=True))
    return found[0]


def same(found, wanted):
    return all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


def left_by_a_layer(keep, offload):
    """Return bytes on the host: rows of the input, and out and lse [rows, batch, heads]."""
    store = math.ceil(offload * round(keep * ROWS)) * BATCH * 2 * (4 * 4 + 4)
    return math.ceil(offload * ROWS) * BATCH * WIDTH * 4 + store


@pytest.mark.parametrize("offload", [0.3, 1.0])
@pytest.mark.parametrize("keep", [0.0, 0.5, 1.0])
def test_same_bits_and_bytes_by_formula(keep, offload):
    layer, weights = model(keep)
    host = memory()
    wanted = gradients(layer, weights, lambda *a: mb.checkpoint(*a, keep=keep))
    for times in (1, 2):
        before = host.bytes_out, host.bytes_back
        found = gradients(
            layer, weights, lambda *a: mb.checkpoint(*a, keep=keep, offload=offload, host=host),
            times,
        )  # fmt: skip
        assert same(found, wanted)
        each = LAYERS * left_by_a_layer(keep, offload)
        assert (host.bytes_out - before[0], host.bytes_back - before[1]) == (each, times * each)
        assert (host.used, host.frames, host.peak) == (0, 0, each)


def test_a_checkpoint_that_saves_its_arguments_through_autograd():
    """Use `storing` and `offloaded_arguments` as around Megatron's own checkpoint."""
    module = importlib.import_module("megatron_burst.recompute.checkpoint")
    layer, weights = model(1.0)
    host = memory()

    def run(layer, x, pair, offload=1.0):
        function = module.storing(layer, 1.0, offload=offload, host=host)
        with module.offloaded_arguments(function):
            return torch_checkpoint(function, x, pair, use_reentrant=True)

    wanted = gradients(layer, weights, lambda *a: mb.checkpoint(*a, keep=1.0))
    assert same(backward(layer, weights, lambda *a: run(*a, offload=0.0)), wanted[1:])
    assert host.bytes_out == 0
    assert same(backward(layer, weights, run), wanted[1:])
    assert host.bytes_out == host.bytes_back == LAYERS * left_by_a_layer(1.0, 1.0)
    assert (host.used, host.frames) == (0, 0)


def backward(layer, weights, run):
    """Compute gradients of the weights; torch's reentrant checkpoint supports only `backward`."""
    x = torch.linspace(-1, 1, ROWS * BATCH * WIDTH).view(ROWS, BATCH, WIDTH).requires_grad_()
    h = x.sin()
    for pair in weights:
        h = run(layer, h, pair)
    h.square().sum().backward()
    found = [w.grad for pair in weights for w in pair]
    for pair in weights:
        for w in pair:
            w.grad = None
    return found


@pytest.mark.parametrize("end", ["no backward", "evaluation", "exception", "in backward"])
def test_nothing_is_left_and_the_next_step_is_right(end):
    layer, weights = model(1.0)
    host, calls = memory(), []

    def run(*args):
        return mb.checkpoint(*args, keep=1.0, offload=1.0, host=host)

    def fails(x, pair):
        calls.append(1)
        if end == "in backward" and len(calls) == LAYERS + 2:
            raise KeyError("on purpose")
        out = layer(x, pair)
        if end == "exception" and len(calls) == 2:
            raise KeyError("on purpose")
        return out

    wanted = gradients(layer, weights, run)
    before = host.bytes_out
    if end in ("exception", "in backward"):
        with pytest.raises(KeyError):
            gradients(fails, weights, run)
    else:
        x = torch.ones(ROWS, BATCH, WIDTH, requires_grad=True)
        with torch.set_grad_enabled(end != "evaluation"):
            for pair in weights:
                x = run(layer, x, pair)
        del x
        assert (host.bytes_out == before) == (end == "evaluation")
    assert (host.used, host.frames) == (0, 0)  # by reference counts, no collector needed
    assert same(gradients(layer, weights, run), wanted)


def test_micro_batches_in_flight():
    layer, weights = model(0.5)
    host = memory()
    flat = [w for pair in weights for w in pair]

    def forward(batch, **given):
        x = torch.linspace(-1, batch + 1, ROWS * BATCH * WIDTH).view(ROWS, BATCH, WIDTH).sin()
        x.requires_grad_()
        for pair in weights:
            x = mb.checkpoint(layer, x, pair, keep=0.5, **given)
        return x.square().sum()

    wanted = [torch.autograd.grad(forward(batch), flat) for batch in range(4)]
    for _ in range(2):  # the second with what the first has learned
        losses = [forward(batch, offload=1.0, host=host) for batch in range(2)]
        for batch in range(4):
            if batch + 2 < 4:
                losses.append(forward(batch + 2, offload=1.0, host=host))
            assert same(torch.autograd.grad(losses.pop(0), flat), wanted[batch])
        assert (host.used, host.frames) == (0, 0)
    assert host.bytes_out == host.bytes_back
    assert host.peak == 3 * LAYERS * left_by_a_layer(0.5, 1.0)


def test_a_result_changed_in_place_is_noticed():
    groups, host = in_process.groups(inter=1, intra=2), memory()
    q, k, v = ([torch.randn(12, 1, 2, 4, requires_grad=True) for _ in "ab"] for _ in "qkv")

    def run(group, *qkv):
        return mb.attention(*qkv, groups=group, layout="striped").mul_(2)

    given = groups.ranks, q, k, v
    outs = in_process.checkpoint(groups, run, *given, keep=1.0, offload=1.0, host=host)
    with pytest.raises(RuntimeError, match="in place"):
        sum(out.pow(3).sum() for out in outs).backward()


def test_dropout_draws_the_same_numbers_again():
    host = memory()
    x = torch.randn(64, 8, requires_grad=True)

    def run(x):
        return torch.nn.functional.dropout(x * 1.0, 0.5)

    out = mb.checkpoint(run, x.sin(), keep=0.0, offload=0.5, host=host)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad == 0, out == 0)


def test_what_cannot_be_is_refused():
    x, host = torch.ones(4, requires_grad=True), memory()
    for offload in (-0.1, 1.1, "half", True):
        with pytest.raises(ValueError, match="offload must be a fraction from 0 to 1"):
            mb.checkpoint(torch.sin, x, offload=offload, host=host)
    for wrong in (None, 10**9):
        with pytest.raises(ValueError, match=r"offload=0\.5 needs host, an mb\.HostMemory"):
            mb.checkpoint(torch.sin, x, offload=0.5, host=wrong)


@pytest.mark.parametrize("how", ["hooks", "checkpoint"])
def test_after_host_memory_ran_out_the_next_step_is_right(how):
    host, x = mb.HostMemory(4096, strict=True, device="cpu"), torch.randn(4096, requires_grad=True)

    def step(rows):
        if how == "checkpoint":
            out = mb.checkpoint(torch.sin, x[:rows] * 1, keep=0.0, offload=1.0, host=host)
        else:
            with host.saved(min_bytes=0):
                out = (x[:rows] * 1).sin()
        return torch.autograd.grad(out.sum(), x)[0][:rows]

    for rows in (1024, 4096, 1024):
        if rows == 4096:
            with pytest.raises(OutOfHostMemory, match="--burst-host-memory 16384 "):
                step(rows)
        else:
            assert torch.equal(step(rows), x[:rows].cos())
        assert (host.used, host.frames) == (0, 0)

"""benchmarks/memory/live.py: bytes of live storages in forward and backward, counted by hand."""

import mmap

import pytest
import torch
from torch import nn

from benchmarks.memory.live import LiveTensors

FLOAT = 4  # bytes


def test_a_storage_counts_once_and_until_its_last_holder_goes():
    with LiveTensors() as live:
        x = torch.zeros(100)
        view = x[10:20].view(2, 5)
        assert live.bytes["device"] == 100 * FLOAT
        del x
        assert live.bytes["device"] == 100 * FLOAT  # the view holds all of it
        del view
        assert live.bytes["device"] == 0
    assert live.peak.bytes == 100 * FLOAT


def test_what_autograd_saved_counts_until_backward_has_used_it():
    x = torch.zeros(100, requires_grad=True)
    with LiveTensors(states=[x]) as live:
        with live.phase("forward"):
            total = x.sin().exp().sum()  # exp saves its result; the sine's is gone
        assert live.peaks["forward"].bytes == 2 * 100 * FLOAT
        assert live.bytes["device"] == 100 * FLOAT + FLOAT
        live.begin("backward")
        total.backward()
        assert live.bytes["device"] == 100 * FLOAT + FLOAT  # the gradient, and the total
    assert live.peaks["backward"].bytes > live.peaks["forward"].bytes - 100 * FLOAT
    assert live.bytes["state"] == 100 * FLOAT


class Function(torch.autograd.Function):
    """Saves its input; makes a large temporary in backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x + 1

    @staticmethod
    def backward(ctx, *grads):
        (x,) = ctx.saved_tensors
        return grads[0] * x.new_ones(50, *x.shape).sum(0)


def test_temporaries_of_backward_and_their_phase():
    x = torch.zeros(100, requires_grad=True)
    x.grad = torch.zeros(100)
    with LiveTensors(states=[x, x.grad]) as live:
        total = Function.apply(x * 2).sum()
        live.begin("backward")
        total.backward()
        live.begin("after")
        del total
    assert 50 * 100 * FLOAT < live.peaks["backward"].bytes < 55 * 100 * FLOAT
    assert live.bytes["device"] == 0
    assert "50, 100" in live.report()


def steps(model, keep, count=3):
    """Return device bytes after each step; `keep` receives the results of a forward."""
    after = []
    with LiveTensors(states=model.parameters()) as live:
        for _ in range(count):
            out = model(torch.ones(8, 16))
            keep(out)
            out.square().mean().backward()
            del out
            after.append(live.bytes["device"])
    return after


def test_a_leak_is_seen():
    """Gradients are allocated in the first step; then nothing is added, unless it leaks."""
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    gradients = 2 * (16 * 16 + 16) * FLOAT
    assert steps(model, keep=lambda out: None) == [gradients] * 3
    kept = []
    leaking = steps(model, keep=kept.append)
    assert leaking[2] - leaking[1] == leaking[1] - leaking[0] == 8 * 16 * FLOAT


def test_host_memory_is_counted_apart():
    room = torch.frombuffer(mmap.mmap(-1, 4096), dtype=torch.uint8)
    first = room.data_ptr()
    with LiveTensors(host=lambda t: t.untyped_storage().data_ptr() == first) as live:
        x = torch.ones(1024)
        room.view(torch.float32).copy_(x)
        assert live.bytes == {"device": 4096, "host": 4096}
        del x
    assert live.bytes["device"] == 0
    assert live.host_peak == 4096


def test_tensors_from_outside_count_from_their_first_use():
    made = torch.ones(1024)
    with LiveTensors() as live:
        assert live.bytes["device"] == 0
        total = made.sum()
        assert live.bytes["device"] == 4096 + FLOAT
        assert {block.operator for block in live.blocks} == {"outside", "aten.sum.default"}
        live.forget()
        assert live.peak.bytes == 4096 + FLOAT
    assert total.item() == 1024


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_hold_inputs_and_one_layer(reentrant):
    """n inputs and the inside of one layer, as in the memory account."""
    from torch.utils.checkpoint import checkpoint

    rows, width, wide, layers = 64, 16, 128, 6

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(width, wide), nn.Linear(wide, width)

        def forward(self, x):
            return self.down(self.up(x).sin())

    model = nn.ModuleList(Wide() for _ in range(layers))
    x = torch.ones(rows, width, requires_grad=True)
    for p in (*model.parameters(), x):
        p.grad = torch.zeros_like(p)
    states = [t for p in (*model.parameters(), x) for t in (p, p.grad)]
    with LiveTensors(states=states) as live:
        live.begin("forward")
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=reentrant)
        loss = x.sum()
        live.begin("backward")
        loss.backward()
    inputs = rows * width * FLOAT  # of all layers but the first, and the result
    inside = rows * wide * FLOAT
    forward = live.peaks["forward"].bytes
    assert forward == pytest.approx((layers - 1) * inputs + 2 * inside + inputs, rel=0.05)
    assert live.peaks["backward"].bytes >= layers * inputs + 3 * inside

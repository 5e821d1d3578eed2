"""Parts of --burst-offload in one process: received inputs, sent outputs, hooks, evaluation."""

import math
import types

import pytest
import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import layers

import megatron_burst as mb
from megatron_burst.megatron.patching import PatchSet
from megatron_burst.megatron.run_state import RunState
from megatron_burst.plugins.longseq.host.mover import HostMemory
from megatron_burst.plugins.longseq.offload import hooks
from megatron_burst.plugins.longseq.offload import tier as tiers
from megatron_burst.plugins.longseq.offload.tier import ReceivedInputs

SHAPE = (64, 1, 8)


@pytest.fixture
def host():
    # A slow link: what does not wait for a copy reads what is not there yet.
    return HostMemory(1 << 20, strict=True, rate=2e4)


@pytest.fixture
def tier(host, monkeypatch):
    monkeypatch.setattr(tiers, "MIN_BYTES", 1)
    made = tiers.Tier(mb.BurstConfig(offload=1.0))
    made.host = host
    return made


def squared(tier, x):
    """A layer that saves its input twice and its output once."""
    with tier.call([x]):
        return (x * x).exp()


def expected(x):
    return 2 * x * (x * x).exp()


@pytest.mark.parametrize("fraction", [1.0, 0.4])
def test_a_received_input_is_freed_once_it_is_on_the_host(tier, fraction):
    tier.fraction = fraction
    received = torch.randn(SHAPE).requires_grad_()
    wanted = expected(received.detach())
    with tier.forward_pass([received]):
        out = squared(tier, received)
        assert received.untyped_storage().nbytes()
    assert received.untyped_storage().nbytes() == 0
    rows = math.ceil(fraction * SHAPE[0])
    assert tier.host.bytes_out == 2 * rows * 8 * 4  # input and output, each once
    out.sum().backward()
    assert torch.equal(received.grad, wanted)
    del out
    assert tier.host.used == 0


def test_an_input_that_something_else_saves_is_not_freed(tier):
    received = torch.randn(SHAPE).requires_grad_()
    with tier.forward_pass(received):
        with tier.call([received]):
            out = received + 1  # saves nothing
        out = out * received.exp()  # and this saves it on the device
    assert received.untyped_storage().nbytes()
    out.sum().backward()


def test_results_of_this_stage_are_not_freed(tier):
    made = torch.randn(SHAPE).requires_grad_() * 1
    with tier.forward_pass(made):
        squared(tier, made)
    assert made.untyped_storage().nbytes()


def test_an_output_emptied_by_the_schedule_while_it_is_copied(tier):
    x = torch.randn(SHAPE).requires_grad_()
    wanted = expected(x.detach())
    out = squared(tier, x)
    schedules.deallocate_output_tensor(out, True)
    assert out.numel() == 1
    schedules.custom_backward(out, torch.ones(SHAPE))
    assert torch.equal(x.grad, wanted)


def test_nothing_moves_in_evaluation_nor_what_all_layers_share(tier):
    x, table = torch.randn(SHAPE).requires_grad_(), torch.randn(SHAPE)
    with tier.evaluation():
        squared(tier, x)
    with torch.no_grad():
        squared(tier, x)
    with tier.call([table]):
        out = x * table
    assert tier.host.bytes_out == 0
    out.sum().backward()
    assert torch.equal(x.grad, table)


def test_a_call_within_a_call_is_part_of_it(tier):
    x = torch.randn(SHAPE).requires_grad_()
    with tier.call([x]) as outer, tier.call([x]) as inner:
        assert inner is outer
        out = x.exp()
    assert tier.host.frames == 1
    out.sum().backward()


def test_a_forward_without_backward_leaves_nothing(tier):
    x = torch.randn(SHAPE).requires_grad_()
    out = squared(tier, x)
    assert tier.host.used > 0
    del out
    assert tier.host.used == 0


@pytest.mark.parametrize("mended", [True, False])
def test_fused_weight_gradients_reach_the_parameter_itself(tier, monkeypatch, mended):
    """Under saved-tensor hooks torch creates a new weight object without Megatron's attributes."""
    patches = PatchSet("weights", RunState(plugins={tiers.OPTIONS: True}))
    if mended:
        hooks.patch_weights(patches)

    def accumulate(total, grad, main):
        main += grad.t() @ total

    fused = types.SimpleNamespace(wgrad_gemm_accum_fp32=accumulate)
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", fused, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    weight = torch.nn.Parameter(torch.randn(4, 8))
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(4, 8), False
    x = torch.randn(6, 8).requires_grad_()
    try:
        with tier.call([x]):
            out = layers.linear_with_grad_accumulation_and_async_allreduce(
                x, weight, None, True, False, False, tp_group=None
            )
        out.sum().backward()
    finally:
        patches.undo()
    assert torch.allclose(weight.main_grad, torch.ones(6, 4).t() @ x.detach())
    assert weight.grad_added_to_main_grad is mended
    assert (weight.grad is not None) is mended  # the hooks of data parallelism wait for one


def test_a_list_without_tensors_is_nothing_received():
    ReceivedInputs(None).free()
    ReceivedInputs([None]).free()

"""Merge, delta and the stand-in output on a device, by each of three codes, against float64."""

import pytest
import torch
from problems import on

from megatron_burst.kernels import native, rowwise
from megatron_burst.kernels.aten import stand_in
from megatron_burst.kernels.online_softmax import merge_, row_delta

ROWS = {"cuda": (4099, 2, 8, 128), "cpu": (13, 2, 4, 24)}
CODES = ("csrc", "triton", "torch")
CASES = [on(device, code, first=True) for device in ROWS for code in CODES]


@pytest.fixture
def code(request, device, monkeypatch):
    """One of CODES and no other; skipped where it is not there."""
    name = request.param
    if name == "csrc":
        if not native.serves(device):
            pytest.skip("csrc/ is not built for this device")
        monkeypatch.setattr(rowwise, "_launch", None)
    else:
        monkeypatch.setattr(native, "FILE", "no csrc")
        if name == "torch":
            monkeypatch.setattr(rowwise, "_code", lambda device: None)
        elif rowwise._code(device) is None:
            pytest.skip("Triton does not run on this device")
    return name


def tensors(device):
    make = torch.Generator(device).manual_seed(7)
    normal = {"generator": make, "device": device}
    shape = ROWS[device]
    out, part = torch.randn(shape, **normal), torch.randn(shape, **normal).bfloat16()
    lse, stats = (5 * torch.randn(shape[:-1], **normal) for _ in range(2))
    lse[::3], stats[::5] = float("-inf"), float("-inf")  # some rows saw nothing in either, or both
    out[::3] = 0
    return out, lse, part, stats


@pytest.mark.parametrize(("device", "code"), CASES, indirect=["code"])
def test_merge(device, code):
    out, lse, part, stats = tensors(device)
    total = torch.logaddexp(lse.double(), stats.double())
    finite = total.masked_fill(total == float("-inf"), 0.0)
    weights = [(x.double() - finite).exp().unsqueeze(-1) for x in (lse, stats)]
    right = weights[0] * out.double() + weights[1] * part.double()
    merge_(out, lse, part, stats)
    assert torch.equal(lse == float("-inf"), total == float("-inf"))
    assert (lse.double() - total)[total.isfinite()].abs().max() < 1e-5
    assert (out.double() - right).abs().max() < 1e-5


@pytest.mark.parametrize(("device", "code"), CASES, indirect=["code"])
def test_delta_and_what_stands_in_for_the_output(device, code):
    out, _, dout, _ = tensors(device)
    dout[1] = 0
    given = out.bfloat16()
    delta = row_delta(dout, given, torch.float32)
    right = (dout.double() * given.double()).sum(-1)
    assert delta.dtype == torch.float32
    assert (delta.double() - right).abs().max() < 1e-4
    made = stand_in(dout, delta)
    implied = (dout.double() * made.double()).sum(-1)
    assert made.dtype == dout.dtype
    assert not made[1].any()
    # less than the rounding of the output to bf16 makes of it
    rounded = (dout.double() * out.double()).sum(-1) - right
    apart = (implied - delta.double()).square().mean().sqrt()
    assert apart < rounded.square().mean().sqrt()

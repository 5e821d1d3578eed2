"""Detected features of torch, and messages if one is missing."""

import re
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

import megatron_burst as mb
from megatron_burst.kernels import operators_cuda, torch_features


@pytest.fixture(autouse=True)
def ask_anew():
    """Clear cached results before and after each test."""
    kept = torch_features._shares_heads, torch_features.adds_wide
    for each in kept:
        each.cache_clear()
    yield
    for each in kept:
        each.cache_clear()


def without(monkeypatch, part):
    """Remove from torch what `part` needs."""
    if part == torch_features.PACKAGE:
        monkeypatch.setattr(type(torch.ops.aten.mm), "overloads", lambda self: ["default", "out"])
    elif part == torch_features.SHARED_HEADS:
        monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *a, **k: SDPBackend.MATH.value)
    else:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch_features, "adds_wide", lambda device: False)


def attention(keys=1):
    q, k = torch.zeros(4, 1, 2, 8), torch.zeros(4, 1, keys, 8)
    mb.attention(q, k, k, groups=mb.Groups.single())


def head():
    mb.linear_cross_entropy(torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(3).long())


def test_this_torch_has_what_the_package_needs():
    refused = [each.part for each in torch_features.lacking() if each.refused]
    assert refused == []


@pytest.mark.parametrize("call", [attention, head])
@pytest.mark.parametrize("version", ["2.7.1", "2.9.0a0+50eac811a6.nv25.09"])
def test_the_version_decides_nothing(call, version, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    call()


@pytest.mark.parametrize("call", [attention, head])
def test_both_doors_refuse_a_torch_without_wide_products(call, monkeypatch):
    without(monkeypatch, torch_features.PACKAGE)
    monkeypatch.setattr(torch, "__version__", "2.7.1+cu128")
    words = "megatron-burst needs torch 2.8 or newer, got 2.7.1+cu128, in which products"
    with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
        call()


def test_shared_heads_on_the_cpu_are_refused_where_the_operator_would_corrupt_memory(monkeypatch):
    without(monkeypatch, torch_features.SHARED_HEADS)
    with pytest.raises(ValueError, match=r"kernel aten needs torch 2\.9 or newer.*outside its"):
        attention(keys=1)
    attention(keys=2)


def test_the_answer_about_shared_heads_does_not_depend_on_what_surrounds_the_question():
    with sdpa_kernel(SDPBackend.MATH), torch.device("meta"), FakeTensorMode():
        assert torch_features._shares_heads()
        assert not torch.backends.cuda.flash_sdp_enabled()  # as the caller left it


@pytest.mark.parametrize("part", [each.part for each in torch_features.FEATURES])
def test_what_is_lacking_is_named_with_a_remedy(part, monkeypatch):
    without(monkeypatch, part)
    (feature,) = torch_features.lacking()
    assert feature.part == part
    reason = torch_features.refusal(part)
    assert (reason is not None) == feature.refused
    if reason is not None:
        assert torch.__version__ in reason
        assert feature.remedy in reason


def test_whether_sums_are_wide_is_tried(monkeypatch):
    tried = []

    def add(total, a, b, *, out_dtype, out):
        tried.append((a.dtype, out_dtype))
        if len(tried) > 1:
            raise RuntimeError("self and mat2 must have the same dtype")

    monkeypatch.setattr(torch, "addmm", add)
    assert torch_features.adds_wide(torch.device("cpu"))
    assert torch_features.adds_wide(torch.device("cpu"))  # asked once
    torch_features.adds_wide.cache_clear()
    assert not torch_features.adds_wide(torch.device("cpu"))
    assert tried == [(torch.bfloat16, torch.float32)] * 2


def test_cudnn_gets_statistics_of_the_shape_that_its_forward_returns():
    """[b, h, s] in 2.8, [b, h, s, 1] later."""
    x = torch.empty(2, 3, 16, 8, dtype=torch.bfloat16, device="meta")
    stats = torch.ops.aten._scaled_dot_product_cudnn_attention(x, x, x, None, True, 0.0, True)[1]
    assert (2, 3, 16, *operators_cuda.CudaCudnn().stats_end) == tuple(stats.shape)


def test_installers_ask_for_what_the_package_needs():
    """A development build of the release is enough: pip counts 2.9.0a0 as older than 2.9."""
    (package,) = (one for one in torch_features.FEATURES if one.part == torch_features.PACKAGE)
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    assert re.findall(r'"torch>=([\w.]+)"', text) == [f"{package.since}.0a0"]

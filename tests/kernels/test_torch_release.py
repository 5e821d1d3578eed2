"""What is said of older releases of torch, and which release a version is."""

import re
from pathlib import Path

import pytest
import torch

import megatron_burst as mb
from megatron_burst.kernels import torch_release


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("2.6.0", (2, 6)),
        ("2.10.0+cu128", (2, 10)),
        ("2.9.0a0+50eac81.nv25.09", (2, 8)),
        ("2.15.0.dev20261101", (2, 14)),
        ("2.9.0b1", (2, 8)),
        ("2.9.0rc1", (2, 9)),
        ("3.0", (3, 0)),
    ],
)
def test_a_development_build_counts_as_the_release_before(version, release):
    assert torch_release.release(version) == release


@pytest.mark.parametrize(
    ("version", "refused", "noted"),
    [("2.7.1", 1, 1), ("2.8.0", 1, 1), ("2.9.1", 0, 1), ("2.10.0", 0, 0), ("3.0.0", 0, 0)],
)
def test_what_is_said_of_a_version(version, refused, noted, monkeypatch):
    found = torch_release.limits(version)
    assert [limit.refused for limit in found].count(True) == refused
    assert len(found) == refused + noted
    monkeypatch.setattr(torch, "__version__", version)
    assert torch_release.limits() == found
    for limit in torch_release.LIMITS:
        assert torch_release.concerns(limit.part) == (limit in found)
        reason = torch_release.refusal(limit.part)
        assert (reason is not None) == (limit in found and limit.refused)
        if reason is not None:
            assert version in reason
            assert limit.remedy in reason


def attention():
    x = torch.zeros(4, 1, 2, 8)
    mb.attention(x, x, x, groups=mb.Groups.in_process(intra=1))


def head():
    mb.linear_cross_entropy(torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(3).long())


@pytest.mark.parametrize("call", [attention, head])
def test_both_doors_refuse_a_torch_that_is_too_old(call, monkeypatch):
    call()
    monkeypatch.setattr(torch, "__version__", "2.8.0+cu128")
    words = "megatron-burst needs torch 2.9 or newer, found 2.8.0+cu128: before, "
    with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
        call()


def test_the_release_that_is_installed_is_the_one_that_is_checked():
    """What installers are told is what the doors say."""
    (package,) = (one for one in torch_release.LIMITS if one.part == torch_release.PACKAGE)
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    assert re.findall(r'"torch>=([\d.]+)"', text) == [".".join(map(str, package.since))]


def test_the_operators_of_this_torch_are_as_the_table_says():
    """Asked of whatever torch runs the tests; nothing is computed."""
    found = torch_release.release()
    assert ("dtype_out" in torch.ops.aten.mm.overloads()) == (found >= (2, 8))
    assert ("dtype_out" in torch.ops.aten.addmm.overloads()) == (found >= (2, 8))

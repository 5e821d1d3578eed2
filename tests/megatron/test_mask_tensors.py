"""Mask tensors that a script passes to a causal layer: redundant ones are accepted."""

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from torch.utils.checkpoint import checkpoint

import megatron_burst.megatron as burst
from megatron_burst.megatron.attention import core_attention
from megatron_burst.megatron.attention.core_attention import check_call, is_redundant
from megatron_burst.megatron.data.cut import BatchCut
from megatron_burst.megatron.patching import run_state

LATER = [[False, True, True], [False, False, True], [False, False, False]]
DOCUMENTS = [[False, True, True], [True, False, True], [True, False, False]]


@pytest.fixture(autouse=True)
def installed():
    burst.uninstall()
    burst.install("zigzag")
    yield
    burst.uninstall()


def called_with(mask, kind=AttnMaskType.causal):
    """Return the error of a call, or None."""
    try:
        check_call(kind, {"attention_mask": mask}, None, BatchCut("zigzag"))
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(1, 1, 4, 4, dtype=torch.bool),
        torch.zeros(1, 1, 4, 4, dtype=torch.bool),
        torch.ones(1, 1, 2, 4, dtype=torch.bool),
        torch.tensor([[LATER]]),
        torch.tensor([[LATER], [LATER]]),
    ],
)
def test_a_mask_that_adds_nothing_is_accepted(mask):
    assert called_with(mask) is None
    assert called_with(mask) is None
    assert "attention_mask is not supported" in called_with(mask, AttnMaskType.no_mask)


@pytest.mark.parametrize(
    "mask",
    [
        torch.tensor([[DOCUMENTS]]),
        torch.tensor([[LATER], [DOCUMENTS]]),
        torch.tensor([[LATER]]).logical_not(),
        torch.tensor([[LATER[:2]]]),
        torch.ones(1, 1, 4, 4),
        torch.ones(1, 1, 4, 4, dtype=torch.int64),
        torch.zeros(0, dtype=torch.bool),
        "causal",
    ],
)
def test_any_other_mask_is_refused(mask):
    assert "attention_mask is not supported" in called_with(mask)


def test_a_mask_is_read_once_and_again_when_it_changes():
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    assert is_redundant(mask)
    read = run_state().redundant_masks
    assert len(read) == 1
    read[mask] = mask._version, False
    assert not is_redundant(mask)  # not read again
    mask[..., 0] = False
    mask[..., 1] = False
    assert not is_redundant(mask)
    mask.fill_(True)
    assert is_redundant(mask)
    del mask
    assert len(read) == 0


def test_a_mask_is_not_read_again_in_backward(monkeypatch):
    """Recomputation gives every layer a new tensor of the same mask."""
    read = []
    monkeypatch.setattr(core_attention, "is_redundant", lambda mask: read.append(mask) or True)

    def layer(x, mask):
        assert called_with(mask) is None
        return 2 * x

    x, mask = torch.ones(4, requires_grad=True), torch.ones(1, 1, 4, 4, dtype=torch.bool)
    out = checkpoint(layer, x, mask, use_reentrant=True)
    out.sum().backward()
    assert len(read) == 1


@torch.inference_mode()
def test_a_mask_of_inference_mode():
    assert called_with(torch.ones(1, 1, 4, 4, dtype=torch.bool)) is None
    assert called_with(torch.tensor([[DOCUMENTS]])) is not None

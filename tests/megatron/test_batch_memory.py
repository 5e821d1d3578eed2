"""Bytes of a batch on the device: whole sequences until they are cut, then this rank's part."""

import inspect

import pytest
import torch
from megatron.core import utils
from rotary import Group, installed

import megatron_burst.megatron as burst
from benchmarks.memory.live import LiveTensors

TOKENS, RANKS = 2**16, 8
EACH = {  # bytes per token
    "tokens": torch.int64, "labels": torch.int64, "loss_mask": torch.float32,
    "position_ids": torch.int64,
}  # fmt: skip
PER_TOKEN = sum(dtype.itemsize for dtype in EACH.values())


@pytest.fixture(autouse=True)
def clean():
    burst.uninstall()
    yield
    burst.uninstall()


@pytest.mark.parametrize("documents", [None, (0, TOKENS // 2 + 3, TOKENS)])
@pytest.mark.parametrize("layout", ["striped", "contiguous"])
def test_whole_sequences_are_gone_when_they_are_cut(layout, documents):
    installed(layout)
    function = utils.get_batch_on_this_cp_rank
    hybrid = "is_hybrid_cp" in inspect.signature(function).parameters
    named = {"is_hybrid_cp": False} if hybrid else {}
    with LiveTensors() as live:
        batch = {name: torch.zeros(1, TOKENS, dtype=dtype) for name, dtype in EACH.items()}
        if documents:
            batch["cu_seqlens"] = torch.tensor([documents], dtype=torch.int32)
        live.forget()
        function(batch=batch, cp_group=Group(3, RANKS), **named)
        mine = PER_TOKEN * TOKENS // RANKS
        index = 8 * TOKENS // RANKS if documents or layout == "striped" else 0
        assert mine <= live.bytes["device"] <= mine + index + 1024
    assert PER_TOKEN == 28
    first = 8 * TOKENS // RANKS  # a part of the first of them beside all
    assert live.peak.bytes <= PER_TOKEN * TOKENS + 2 * first + 1024
    assert all(batch[name].shape == (1, TOKENS // RANKS) for name in EACH)

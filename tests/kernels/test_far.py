"""Offsets beyond 2^31 elements give the same results as neighbouring memory.

The tests need little memory.
"""

import importlib.util

import csrc_library
import interpreted
import numpy as np
import pytest
import torch
from far import APART, AXES, check_logits, check_results, far

import megatron_burst as mb
from megatron_burst.comm import packing
from megatron_burst.execution.buffers import rows_at
from megatron_burst.execution.rank_plan import RowPlace
from megatron_burst.kernels import native


@pytest.mark.parametrize("axis", AXES)
def test_rows_of_results(monkeypatch, axis):
    monkeypatch.setattr(native, "FILE", csrc_library.NONE)  # tests of csrc/ ask the library
    check_results(AXES[axis])


def test_tiles_of_logits(monkeypatch):
    monkeypatch.setattr(native, "FILE", csrc_library.NONE)
    check_logits()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_triton_kernels():
    found = interpreted.run("triton_far.py", timeout=120)
    assert len(found) == 26
    assert [case for case, same in found.items() if not same] == []


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_rows_of_shards(layout):
    x = torch.randn(16, 3)
    cut = mb.layout.make(layout, cp_size=4)
    parts = [mb.shard(far(x, 0)[:, :3], cut, rank) for rank in range(4)]
    assert torch.equal(torch.cat(parts), torch.cat([mb.shard(x, cut, rank) for rank in range(4)]))
    assert torch.equal(mb.unshard([far(part, 0) for part in parts], cut), x)
    index = torch.tensor([0, 15, 7])
    assert torch.equal(rows_at((far(x, 0),), RowPlace(len(index), index, False))[0], x[index])


def test_a_message_of_more_than_4_gib():
    rows, width = 524288, 4096
    shapes = [(torch.Size([rows, width]), torch.bfloat16), (torch.Size([rows, 32]), torch.float32)]
    bytes_ = rows * (2 * width + 4 * 32)
    memory = far(torch.zeros(8, 1, dtype=torch.uint8), 0)  # 7 GiB, of which nothing is touched
    buffer = memory.as_strided((7 * APART,), (1,))
    message = packing.carve(buffer, packing.layout_of(shapes))
    assert message.flat.numel() == bytes_ + packing.ENVELOPE > 1 << 32
    large, small = message.tensors
    large[-1, -1], small[0, 0], small[-1, -1] = 1.0, 2.0, 3.0
    assert large[-1, -1] == 1
    assert small.data_ptr() - buffer.data_ptr() == 2 * rows * width
    seal = packing.Envelope(packing.CallTag(2**32 - 1, 2**40, 2**32 - 2), 2**33)
    packing.write_envelope_(message, seal)
    assert packing.mismatch(message.flat, seal) is None
    assert small[-1, -1] == 3
    other = packing.Envelope(packing.CallTag(2**32 - 1, 2**40 + 1, 2**32 - 2), 2**33)
    assert "call 1099511627777 of this rank received a message of call 1099511627776" in str(
        packing.mismatch(message.flat, other)
    )
    assert "of another size than the expected" in str(
        packing.mismatch(message.flat[1 << 32 :], seal)
    )


def test_far_is_far():
    """The check itself: a 32-bit offset would be another place."""
    x = far(torch.arange(1.0, 5.0)[:, None], 0)
    offsets = APART * np.arange(4)
    assert (offsets.astype(np.int32) != offsets).sum() == 2
    assert x.untyped_storage().nbytes() > 3 * 2**32
    assert x.flatten().tolist() == [1, 2, 3, 4]

"""Tensors of 2^31 elements, 524,288 rows of 4,096: copies, merges and products.

One test at a time, at most 12 GiB. `test_far` tests offsets without the memory; here all elements
exist.
"""

import gc

import pytest
import torch

import megatron_burst as mb
from megatron_burst.comm import packing
from megatron_burst.execution.buffers import rows_at
from megatron_burst.execution.rank_plan import RowPlace
from megatron_burst.kernels import native
from megatron_burst.kernels.online_softmax import merge_, row_delta

ROWS, WIDTH, HEADS = 524288, 4096, 32
NEEDED = 13 * 2**30

pytestmark = pytest.mark.slow


def available():
    """Return the free bytes of this machine by /proc/meminfo; 0 without it."""
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":") for line in file)
    except OSError:
        return 0
    return 1024 * int(lines["MemAvailable"].split()[0])


@pytest.fixture(autouse=True)
def memory():
    gc.collect()
    if available() < NEEDED:
        pytest.skip(f"needs 13 GiB of free memory, and there are {available() / 2**30:.1f}")
    yield
    gc.collect()


def numbers(rows):
    """Return int16 [rows]: the value of every element; rows 2^31 elements apart differ."""
    return (rows % 32749).to(torch.int16)


def labelled(rows):
    return numbers(torch.arange(rows))[:, None].expand(rows, WIDTH).contiguous()


def check(x, rows):
    for first in range(0, len(x), 1 << 16):
        part = x[first : first + (1 << 16)]
        assert (part == numbers(rows[first : first + (1 << 16)])[:, None]).all()


@pytest.mark.parametrize("name", ["zigzag", "striped"])
def test_shards(name):
    layout, whole = mb.layout.make(name, cp_size=2), labelled(ROWS)
    assert whole.numel() == 2**31
    parts = [mb.shard(whole, layout, rank) for rank in range(2)]
    del whole
    for rank in range(2):
        check(parts[rank], torch.from_numpy(layout.positions(rank, ROWS)))
    check(mb.unshard(parts, layout), torch.arange(ROWS))


def test_messages_and_rows_of_chunks():
    whole = labelled(ROWS)
    message = packing.pack([whole, whole[:8]], packing.Envelope(packing.NO_CALL, 7))
    assert message.flat.numel() > 2**32
    del whole
    assert packing.mismatch(message.flat, packing.Envelope(packing.NO_CALL, 7)) is None
    check(message.tensors[0], torch.arange(ROWS))
    check(message.tensors[1], torch.arange(8))
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
    check(rows_at(message.tensors[:1], RowPlace(len(order), order, False))[0], order)


@pytest.mark.parametrize("code", ["torch", "csrc"])
def test_delta_and_merge(monkeypatch, request, code):
    """With out [s, 1, h, d] of constant rows, delta and merge are known for each row."""
    if code == "csrc":
        request.getfixturevalue("built")
    else:
        monkeypatch.setattr(native, "FILE", "there is no such library")
    rows = ROWS if code == "csrc" else ROWS // 2  # torch makes a copy in float32
    shape = rows, 1, HEADS, WIDTH // HEADS
    each = torch.arange(rows).remainder(64).to(torch.bfloat16)
    part = each.view(-1, 1, 1, 1).expand(shape).contiguous()
    if code == "csrc":
        delta = row_delta(part, part, torch.float32)
        assert torch.equal(delta, (128 * each.float() ** 2).view(-1, 1, 1).expand(delta.shape))
    out, lse = torch.zeros(shape), torch.zeros(shape[:-1])
    merge_(out, lse, part, torch.zeros(shape[:-1]))
    for first in range(0, rows, 1 << 15):
        some = slice(first, first + (1 << 15))
        assert (out[some] == each[some].float().view(-1, 1, 1, 1) / 2).all()
    assert torch.allclose(lse, torch.tensor(2.0).log())


def test_loss_of_all_rows():
    """The head has 8 words: each row's loss equals that of the first row with the same label."""
    hidden = torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16)
    labels = torch.arange(ROWS) % 8
    hidden[torch.arange(ROWS), labels] = 1.0
    hidden.requires_grad_()
    weight = torch.eye(8, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    loss = mb.linear_cross_entropy(hidden[:, None], weight, labels[:, None])
    right = torch.log(torch.exp(torch.tensor(1.0)) + 7) - 1
    assert torch.allclose(loss.float(), right.expand_as(loss), atol=1e-2)
    loss.sum().backward()
    assert torch.equal(hidden.grad[-8:], hidden.grad[:8])
    assert not torch.equal(hidden.grad[-1], hidden.grad[-2])

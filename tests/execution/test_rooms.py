"""Sizes and reuse of message buffers, and state that calls on the same groups share."""

from itertools import permutations
from types import SimpleNamespace
from typing import Any, cast

import oracle
import pytest
import torch

import megatron_burst as mb
from megatron_burst.execution.buffers import Buffers, MessageKind
from megatron_burst.plugins.testing import in_process

WIDTH = 16  # bytes of a row


def buffers(longest):
    """Use meta tensors, with which a buffer is exactly as long as its message."""
    endpoint = cast("Any", SimpleNamespace(room=0, released=lambda tensors: None))
    kinds = {"kv": MessageKind([(torch.Size((WIDTH,)), torch.uint8)], longest)}
    return Buffers(torch.device("meta"), endpoint, kinds)


@pytest.mark.parametrize(
    ("rows", "room"),
    [(64, 64), (63, 64), (32, 64), (17, 64), (16, 16), (5, 16), (4, 4), (2, 4), (1, 1), (0, 1),
     (80, 80)],
)  # fmt: skip
def test_a_buffer_is_the_longest_or_a_power_of_a_fourth_of_it(rows, room):
    message = buffers(64).take("kv", rows)
    assert message.tensors[0].shape == (rows, WIDTH)
    assert message.room.numel() == room * WIDTH


def test_short_messages_take_the_longer_buffers_that_are_free():
    held = buffers(64)
    small = [held.take("kv", 4) for _ in range(16)]
    assert sum(each.room.numel() for each in small) == 64 * WIDTH
    whole = held.take("kv", 64)
    held.give("kv", whole)
    half = held.take("kv", 32)  # as halves of chunks are in a zigzag layout
    assert half.room is whole.room
    held.give("kv", half)
    assert held.take("kv", 3).room is whole.room
    held.give("kv", small[0])
    assert held.take("kv", 3).room is small[0].room
    assert held.take("kv", 64).room is not whole.room  # nobody gives a long one a short buffer


@pytest.mark.parametrize("order", list(permutations((1, 2, 4))), ids=str)
@pytest.mark.parametrize("side", ["kv", "query"])
def test_head_chunks_of_calls_on_the_same_groups(order, side):
    """With several head chunks, some compute the own pair last; with one, none does."""
    size, rows = 4, 8
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(size * rows, 1, 4, 8, generator=generator, dtype=torch.float64)
        for _ in range(4)
    ]
    seen = torch.ones(size * rows, size * rows, dtype=torch.bool).tril()
    out, _, *gradients = oracle.attention(*inputs, seen)
    mine = oracle.permutation("zigzag", size, size * rows)
    right = [x[each] for x in (out, *gradients) for each in mine]
    groups = in_process.groups(intra=size)
    for head_chunks in order:
        *qkv, douts = [[x[each].clone() for each in mine] for x in inputs]
        leaves = [x.requires_grad_() for xs in qkv for x in xs]
        outs = in_process.attention(
            *qkv, groups=groups, mask=mb.masks.Causal(), layout="zigzag", algorithm="burst",
            head_chunks=head_chunks, side=side, kernel="reference",
        )  # fmt: skip
        grads = torch.autograd.grad(outs, leaves, douts)
        worst = max(oracle.worst(x, y) for x, y in zip([*outs, *grads], right, strict=True))
        assert worst < 1e-10, head_chunks

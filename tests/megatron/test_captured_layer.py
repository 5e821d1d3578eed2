"""Core attention of a layer while a CUDA graph captures it, on four ranks of the CPU.

It looks its plan up. Calls that a graph cannot replay are refused on every rank.
"""

from collections import Counter
from unittest import mock

import packed_ranks
import pytest
import torch
from packed_ranks import HEADS, TOTAL, WIDTH

GRAPHS = {"cuda_graph_impl": "local"}


def counted(happens, **settings):
    """Return how often `happens` makes a plan, compares plans, and exchanges data between hosts.

    It gets ``forward(length, captured)``.
    """
    from megatron_burst.comm.groups import Groups
    from megatron_burst.megatron.attention import plan_book

    counts = Counter()

    def forward(length=TOTAL, captured=False, packed=False, mask=None):
        x = torch.ones(length // 4, 1, HEADS, WIDTH, requires_grad=True)
        asked = packed_ranks.params() if packed else None
        with mock.patch.object(plan_book, "capturing", return_value=captured):
            x = x.squeeze(1) if packed else x
            core(x, x, x, mask, packed_seq_params=asked).sum().backward()

    def noting(home, name):
        own = getattr(home, name)
        return mock.patch.object(
            home, name, lambda *args, **named: counts.update([name]) or own(*args, **named)
        )

    with packed_ranks.core_attention("zigzag") as core:
        core._graphs = "--cuda-graph-impl" if settings else None
        with noting(plan_book, "prepared"), noting(Groups, "compare"), noting(Groups, "gather"):
            try:
                happens(forward)
            except ValueError as error:
                return f"{error}"
    return counts["prepared"], counts["compare"], counts["gather"]


def captured_after_a_call(forward):
    forward()
    for _ in range(3):
        forward(captured=True)


def not_captured(forward):
    for _ in range(4):
        forward()


def captured_at_once(forward):
    forward(captured=True)


def packed(forward):
    forward(packed=True)


def masked(forward):
    forward(mask=torch.ones(1, 1, 4, 4, dtype=torch.bool))


def test_nothing_is_made_or_compared_while_a_layer_is_captured(four):
    ((made, compared, gathered),) = {*four(counted, captured_after_a_call)}
    assert (made, compared) == (1, 0)
    assert {*four(counted, not_captured)} == {(1, 3, gathered + 3)}


@pytest.mark.parametrize(
    ("happens", "words"),
    [
        (captured_at_once, "a CUDA graph captures attention without a plan"),
        (packed, "packed_seq_params with --cuda-graph-impl: CUDA graphs that contain attention"),
        (masked, "attention_mask with --cuda-graph-impl: a capture of attention"),
    ],
)
def test_what_a_graph_cannot_replay_is_refused_on_every_rank(four, happens, words):
    from functools import partial

    found = four(partial(counted, **GRAPHS), happens)
    assert all(words in each for each in found), found

"""A short sample of `make fuzz` for the LM head, and planted faults that it must detect."""

from dataclasses import replace
from itertools import chain
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from workers import Workers

from megatron_burst.linear_cross_entropy import split
from megatron_burst.linear_cross_entropy.formula import Formula
from tests.fuzz import lm_head
from tests.fuzz.head_cases import BLOCK, draw


def alone(world: int) -> Workers:
    raise AssertionError(f"these cases need no {world} ranks")


def test_calls_in_one_process():
    tally = lm_head.search(chain(range(BLOCK), range(2 * BLOCK, 3 * BLOCK)), alone)
    assert tally.tried == 2 * BLOCK
    assert not tally.failures, str(tally)


@pytest.mark.parametrize(("world", "block", "count"), [(2, 1, 30), (4, 3, 20)])
def test_calls_over_ranks(ranks, world, block, count):
    tally = lm_head.search(range(block * BLOCK, block * BLOCK + count), ranks)
    assert tally.kinds[f"ranks {world}"] == count
    assert not tally.failures, str(tally)


def test_a_planted_fault_is_found_and_can_be_replayed():
    with mock.patch.object(Formula, "softmax_factor", return_value=1.0):
        tally = lm_head.search(range(BLOCK), alone)
        (number, *_) = (n for n in range(BLOCK) if lm_head.check(n))
        assert draw(number).options.z_loss
        assert lm_head.search([number], alone).failures
    assert f"again: python -m tests.fuzz lm_head --replay {number}" in tally.failures[0]
    assert not lm_head.search([number], alone).failures


def test_a_loss_with_the_rounding_of_bf16_is_found():
    """The bounds of low precision detect a loss rounded to bf16."""
    merge = split.Split.merge

    def rounded(self, stats):
        actual = merge(self, stats)
        return actual._replace(lse=actual.lse.bfloat16().to(actual.lse.dtype))

    def compared(number):  # the loss of poisoned rows is not
        return replace(draw(number), poison=None)

    low = [n for n in range(BLOCK) if draw(n).dtype is not torch.float64 and 0 not in draw(n).shape]
    with (
        mock.patch.object(split.Split, "merge", rounded),
        mock.patch.object(lm_head, "draw", compared),
    ):
        noticed = sum(bool(lm_head.check(n)) for n in low)
    assert noticed > 0.8 * len(low)


def forgetful(number):
    """Run a case on ranks that do not reduce the gradient of hidden."""
    lazy = lambda self, partial: split.InFlight(partial)  # noqa: E731
    with mock.patch.object(split.Split, "reduce", lazy):
        return lm_head.check(number, dist.get_rank())


def test_a_sum_that_is_forgotten_is_found(ranks):
    numbers = [n for n in range(BLOCK, 2 * BLOCK) if not draw(n).sequence_parallel]
    numbers = [n for n in numbers if not draw(n).frozen and draw(n).factor][:4]
    actual = [ranks(2).run(forgetful, n) for n in numbers]
    assert sum(any(some) for some in actual) >= 3, actual

"""Merged partial results equal attention over all keys at once, in any order."""

import math
from itertools import pairwise

import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_burst.kernels.online_softmax import accumulation_dtype, empty_result, merge_

S, T, B, H, W = 5, 12, 2, 3, 4


def parts(cuts, blind=(), spread=1.0, dtype=torch.float64):
    """Return partial (out, lse) of random scores over the key ranges between `cuts`, and the whole.

    Rows in `blind` see only the keys of the last part. `spread` widens the scores.
    """
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(S, B, H, T, generator=generator, dtype=torch.float64) * spread
    values = torch.randn(T, B, H, W, generator=generator, dtype=torch.float64)
    scores[list(blind), :, :, : cuts[-2]] = -math.inf

    def over(start, stop):
        lse = torch.logsumexp(scores[..., start:stop], dim=-1)
        weights = torch.exp(scores[..., start:stop] - lse.unsqueeze(-1)).nan_to_num(0.0)
        out = torch.einsum("sbht,tbhw->sbhw", weights, values[start:stop])
        return out.to(dtype), lse.to(dtype)

    pieces = [over(a, b) for a, b in pairwise(cuts)]
    return pieces, over(0, T)


def merged(pieces, dtype=torch.float64):
    out, lse = empty_result(torch.empty(S, B, H, 1, dtype=dtype), W)
    for piece in pieces:
        merge_(out, lse, *piece)
    return out, lse


def same(got, wanted, tolerance=1e-12):
    for mine, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine.double(), right.double(), rtol=tolerance, atol=tolerance)


@given(st.permutations(range(4)))
def test_any_order_gives_attention_over_all_keys(order):
    pieces, whole = parts([0, 1, 4, 9, T], blind=[2])
    same(merged([pieces[i] for i in order]), whole)


def test_a_row_that_saw_nothing_stays_zero_and_minus_infinity():
    out, lse = merged([])
    assert torch.equal(out, torch.zeros(S, B, H, W, dtype=torch.float64))
    assert torch.equal(lse, torch.full((S, B, H), -math.inf, dtype=torch.float64))
    merge_(out, lse, out.clone(), lse.clone())
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -math.inf))


def test_nothing_merged_into_something_changes_no_bit():
    pieces, _ = parts([0, T])
    out, lse = merged(pieces)
    before = out.clone(), lse.clone()
    merge_(out, lse, torch.zeros_like(out), torch.full_like(lse, -math.inf))
    assert torch.equal(out, before[0])
    assert torch.equal(lse, before[1])


@pytest.mark.parametrize("shift", [-3e4, -700.0, 700.0, 3e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_far_apart_neither_overflow_nor_lose_the_larger(shift, dtype):
    (a, b), _ = parts([0, 5, T], dtype=dtype)
    b = b[0], b[1] + shift
    out, lse = merged([a, b], dtype)
    winner = b if shift > 0 else a
    assert torch.isfinite(out).all()
    same((out, lse), winner, 1e-6 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("spread", [0.0, 1.0, 50.0])
def test_float32_is_as_good_as_float32_can_be(spread):
    pieces, whole = parts([0, 1, 4, 9, T], spread=spread, dtype=torch.float32)
    out, lse = merged(pieces, torch.float32)
    assert out.dtype == lse.dtype == torch.float32
    # A float32 lse is off by its own size times 1e-7; weights are exponentials of differences.
    bound = 1e-6 * (1 + whole[1].abs().max().item())
    assert oracle.worst(out, whole[0]) < bound
    assert oracle.worst(lse, whole[1]) < bound


@pytest.mark.parametrize(
    ("dtype", "accumulates"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_accumulators_are_float32_or_wider(dtype, accumulates):
    assert accumulation_dtype(dtype) == accumulates
    out, lse = empty_result(torch.empty(S, B, H, 7, dtype=dtype), W)
    assert out.shape == (S, B, H, W)
    assert lse.shape == (S, B, H)
    assert out.dtype == lse.dtype == accumulates


def test_a_low_precision_part_is_merged_in_float32():
    """bf16 parts of 1 and 1/512: a sum in bf16 would lose the second."""
    one = torch.ones(1, 1, 1, 1, dtype=torch.bfloat16)
    zero = torch.zeros(1, 1, 1)
    out, lse = empty_result(one, 1)
    for value in (1.0, 1.0 + 2**-7):
        merge_(out, lse, one * value, zero)
    assert out.dtype == torch.float32
    assert out.item() == pytest.approx(1.0 + 2**-8, abs=1e-6)
    assert lse.item() == pytest.approx(math.log(2.0), abs=1e-6)

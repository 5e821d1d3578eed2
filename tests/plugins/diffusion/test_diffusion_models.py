"""Diffusion models of Megatron-Bridge over ranks have the losses and gradients of one rank."""

import pytest

PAIRS = [
    ("llada zigzag", "llada whole"),
    ("llada contiguous", "llada whole"),
    ("llada packed zigzag", "llada packed whole"),
    ("llada packed balanced", "llada packed whole"),
    ("nemotron zigzag", "nemotron whole"),
    ("nemotron striped", "nemotron whole"),
    ("nemotron recomputed", "nemotron whole"),
    ("wan zigzag", "wan whole"),
    ("wan balanced", "wan whole"),
    ("wan recomputed", "wan whole"),
    ("wan tensor", "wan tensor whole"),
    ("flux zigzag", "flux whole"),
    ("flux contiguous", "flux whole"),
]


@pytest.mark.parametrize(("run", "reference"), PAIRS)
def test_over_ranks_equals_one_rank(result, run, reference):
    (loss, norms), (whole, expected) = result(run), result(reference)
    assert loss == pytest.approx(whole, rel=1e-6)
    assert norms == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert min(expected.values()) > 0

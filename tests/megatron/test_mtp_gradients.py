"""Gradients of a GPT with MTP heads on four ranks of one sequence equal one rank's.

The cases are after Megatron-LM issue 7452 and pull request 7498: uneven loss masks, two accumulated
micro-batches, Megatron's schedule, data-parallel wrapper and finalizing, in fp32.
"""

import mtp_ranks
import pytest
from megatron.core.transformer import multi_token_prediction as mtp

CASES = [
    (kept, depth, per_token)
    for kept in mtp_ranks.MASKS
    for depth in (1, 3)
    for per_token in (True, False)
]
QUICK = (
    ("all", 1, False), ("none", 1, True), ("first", 3, True), ("last", 3, False),
    ("one shard", 3, True), ("prefix", 3, False), ("thirds", 1, True),
)  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES],
    ids=str,
)
def test_gradients_are_those_of_one_rank(four, case):
    kept, depth, per_token = case
    ours, expected = (
        four(mtp_ranks.gradients, kept, depth, per_token, context) for context in (4, 1)
    )
    if not hasattr(mtp, "process_mtp_loss") and any(g.isnan().any() for g in expected[0].values()):
        pytest.skip("Megatron-Core 0.16 divides by 0 if a head has no tokens: NaN on one rank too")
    for rank in ours:
        assert rank.keys() == expected[0].keys()
        for name, gradient in rank.items():
            reference = expected[0][name]
            if kept == "none":
                assert not gradient.any(), name
            else:
                scale = float(reference.abs().max())
                assert float((gradient - reference).abs().max()) < 2e-5 * max(scale, 1e-3), name

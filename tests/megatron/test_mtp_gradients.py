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


NO_MEAN = [case for case in CASES if case[0] in ("none", "first", "last") and not case[2]]


def cases(chosen):
    marked = [
        case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in chosen
    ]
    return pytest.mark.parametrize("case", marked, ids=str)


def compare(four, case):
    kept, depth, per_token = case
    ours, expected = (
        four(mtp_ranks.gradients, kept, depth, per_token, context) for context in (4, 1)
    )
    for rank in ours:
        assert rank.keys() == expected[0].keys()
        for name, gradient in rank.items():
            reference = expected[0][name]
            if kept == "none":
                assert not gradient.any(), name
            else:
                scale = float(reference.abs().max())
                assert float((gradient - reference).abs().max()) < 2e-5 * max(scale, 1e-3), name


@cases([case for case in CASES if case not in NO_MEAN])
def test_gradients_are_those_of_one_rank(four, case):
    compare(four, case)


@pytest.mark.skipif(
    not hasattr(mtp, "process_mtp_loss"),
    reason="Megatron-Core 0.16 divides by 0 if a head has no tokens: NaN on one rank too",
)
@cases(NO_MEAN)
def test_gradients_if_a_head_has_no_tokens(four, case):
    compare(four, case)

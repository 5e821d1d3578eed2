"""Further heads divide by the tokens of whole sequences: gradients and logged losses."""

import pytest
import session
from megatron.core.transformer import multi_token_prediction

SEPARATE = hasattr(multi_token_prediction, "process_mtp_loss")  # not lines of GPTModel
KEPT = {
    "all": tuple(range(32)),
    "middle": tuple(range(3, 17)),
    # Fewer than ranks; one has none before the mask moves on, another none after.
    "few": (8, 21, 22),
    "none for the second head": (0, 1),
    "none": (),
}


@pytest.mark.skipif(not SEPARATE, reason="Megatron-Core 0.16: GPTModel does it, see below")
@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("kept", KEPT)
def test_losses_are_those_of_whole_sequences(four, per_token, kept):
    for gradients, logged in four(session.further_losses, per_token, KEPT[kept]):
        assert gradients < 1e-6
        assert logged < 1e-6


@pytest.mark.skipif(SEPARATE, reason="Megatron-Core 0.16 alone")
def test_gpt_model_counts_an_equal_share_of_all_tokens(four):
    counts = four(session.counted_by_gpt_model, KEPT["middle"])
    assert [ours for ours, _ in counts] == [14 / 4] * 4
    assert [stock for _, stock in counts] == [2, 4, 4, 4]

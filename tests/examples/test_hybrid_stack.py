"""examples/hybrid_stack.py: four ranks train a hybrid stack as one rank does."""

import hybrid_stack
import pytest


@pytest.mark.slow
def test_four_ranks_train_like_one(ranks):
    together, alone = ranks(4).run(hybrid_stack.compare)[0]
    assert together == pytest.approx(alone, abs=1e-5)
    assert alone[0] - alone[-1] > 1  # it learns, so that wrong gradients would show

"""MLPs in tiles of rows in Megatron-LM's own loop: losses and norms equal those without."""

import pytest
from test_training import INTERLEAVED, MOE, RECOMPUTE, same

# Two pipeline stages of two virtual ones, experts on two ranks each, four micro-batches per step.
EXPERTS = (
    f"{INTERLEAVED.removesuffix(RECOMPUTE)} {MOE} --global-batch-size 8 "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
)


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", RECOMPUTE])
def test_experts_on_interleaved_stages(train, more):
    run = train(4, f"{EXPERTS} {more} --burst-mlp-tiles 4")
    same(run, train(4, EXPERTS))
    assert run.lines("MLP tiles: 4 tiles of 16 rows (--burst-mlp-tiles 4)")


@pytest.mark.slow
def test_beside_burst_attention(train):
    """Zigzag rows of two ranks with sequence parallelism: 16 local rows in tiles of 3 and 2."""
    flags = (
        "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-algo burst "
        "--context-parallel-size 2 --burst-mlp-tiles 6"
    )
    same(train(4, flags), train(1))

"""`--burst-sequence-chunks` in Megatron-LM's own loop: losses equal those of uncut layers."""

import pytest
from test_training import CP2, INTERLEAVED, MOE, TP2, same

pytest.importorskip(
    "megatron.training", reason="megatron.training is in wheels for Python 3.12 and on only"
)
CHUNKS = "--burst-sequence-chunks 3"
FOUR_IN_FLIGHT = INTERLEAVED.split("--recompute-granularity")[0]


def test_two_ranks_in_chunks_train_like_one_that_is_not_cut(train):
    run = train(2, f"{CP2} {CHUNKS}")
    same(run, train(1))
    assert len(run.lines("burst attention:")) == len(run.lines("3 row chunks")) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "more", "stock"),
    [
        (4, f"{FOUR_IN_FLIGHT} {CP2}", (2, FOUR_IN_FLIGHT)),
        (4, f"{INTERLEAVED} {CP2} --burst-attention-store 0.5", (2, INTERLEAVED)),
        (2, f"{MOE} {CP2} --mtp-num-layers 1", (2, f"{MOE} --mtp-num-layers 1")),
        (4, f"{CP2} {TP2} --use-distributed-optimizer --overlap-grad-reduce "
            "--overlap-param-gather", (1, "")),
        (2, f"--packed {CP2} --burst-layout balanced", (1, "--packed")),
        (2, f"{CP2} --burst-offload 1", (1, "")),
        (2, f"{CP2} --burst-mlp-tiles 2", (1, "")),
    ],
    ids=["pp2-vpp2", "pp2-vpp2-store", "experts-mtp", "tp2-overlap", "packed", "host", "tiles"],
)  # fmt: skip
def test_with_the_rest_of_a_run(train, world, more, stock):
    same(train(world, f"{more} {CHUNKS}"), train(*stock))

"""`--sft`: validation does not depend on how a sequence is split."""

import pytest
from test_training import CP2, CP4, same

pytest.importorskip(
    "megatron.training", reason="megatron.training is in wheels for Python 3.12 and on only"
)


@pytest.mark.parametrize(
    ("world", "flags"),
    [(2, CP2), pytest.param(4, f"{CP4} --burst-layout striped", marks=pytest.mark.slow)],
)
def test_supervised_fine_tuning(train, world, flags):
    stock = train(1, "--sft")
    same(train(world, f"--sft {flags}"), stock)
    # With equal weights for micro-batches of unequally many tokens: not what it is without --sft.
    assert stock.evaluations != pytest.approx(train(1).evaluations, rel=1e-6)


def test_supervised_fine_tuning_on_packs_in_balance(train):
    same(train(2, f"--sft --packed {CP2} --burst-layout balanced"), train(1, "--sft --packed"))

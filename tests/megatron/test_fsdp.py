"""Fully sharded data parallelism over DP x CP.

Losses and gradients equal those of whole parameters whose gradients are summed over all ranks by
hand.
"""

from functools import partial

import fsdp_ranks
import pytest

TOLERANCE = 1e-10  # fp64


def differences(four, how, **options):
    ours, truth = (four(partial(fsdp_ranks.trained, **options), each) for each in (how, "summed"))
    losses, grads = [], []
    for mine, right in zip(ours, truth, strict=True):
        for (loss, some), (wanted, all_) in zip(mine, right, strict=True):
            losses.append(abs(loss - wanted))
            assert some.keys() == all_.keys()
            grads += [(some[name] - all_[name]).abs().max().item() for name in all_]
    assert min(g.abs().max() for _, some in truth[0] for g in some.values()) > 1e-6
    return max(losses), max(grads)


@pytest.mark.parametrize("algorithm", ["burst", "ulysses"])
def test_torch_fsdp2(four, algorithm):
    loss, grad = differences(four, "torch", algorithm=algorithm)
    assert loss < TOLERANCE
    assert grad < TOLERANCE

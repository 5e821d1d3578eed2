"""A short search on real ranks with fixed seeds; `make fuzz` searches as long as one likes."""

import pytest
from fuzz import faults, gloo, misuse


@pytest.mark.parametrize("block", [0, 1])
def test_random_calls_on_real_ranks(ranks, block):
    tally = gloo.search(range(block * gloo.BLOCK, block * gloo.BLOCK + 10), ranks)
    assert not tally.failures, tally


@pytest.mark.parametrize("name", list(misuse.ALL))
def test_a_misuse_is_told_well(name):
    assert not misuse.faults(name)


@pytest.mark.parametrize("name", faults.SHORT)
def test_ranks_out_of_step_end_in_an_error(ranks, name):
    assert not faults.faults(name, ranks)

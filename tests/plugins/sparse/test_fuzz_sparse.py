"""Short searches with fixed seeds; `make fuzz ARGS="sparse compressed"` searches without limit."""

import pytest
from fuzz import compressed, sparse


@pytest.mark.parametrize("part", [sparse, compressed], ids=["sparse", "compressed"])
def test_random_layers(part):
    tally = part.search(range(8))
    assert not tally.failures, tally
    assert tally.tried == 8

"""A short search with fixed seeds; `make fuzz ARGS=sparse` searches without a limit."""

from fuzz import sparse


def test_random_layers():
    tally = sparse.search(range(8))
    assert not tally.failures, tally
    assert tally.tried == 8

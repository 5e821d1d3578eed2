"""Fixtures all tests share."""

import csrc_library
import pytest
import torch
from hypothesis import Phase, settings
from workers import Workers

from megatron_burst.kernels import native

# Reproducible and without a database on disk; a slow machine is not a failure.
settings.register_profile("repo", derandomize=True, database=None, deadline=None, max_examples=60)
# For tests/mutants.py, where any failing example will do, and nobody reads it.
some = (Phase.explicit, Phase.generate)
settings.register_profile("mutants", settings.get_profile("repo"), phases=some)
settings.load_profile("repo")


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks():
    """`ranks(n)`: n gloo processes, shared by all tests that ask for the same n in a row.

    One pool at a time: every process group keeps a thread that wakes up a hundred times a
    second, so idle ranks are not free, and a new pool costs less than a second.
    """
    pools = []

    def get(world):
        if not (pools and pools[0].alive and pools[0].world == world):
            while pools:
                pools.pop().close()
            pools.append(Workers(world))
        return pools[0]

    yield get
    while pools:
        pools.pop().close()


@pytest.fixture(scope="session")
def csrc_file(tmp_path_factory):
    """The compiled operators, for the CPU."""
    return csrc_library.library(tmp_path_factory.mktemp("csrc"), "--cpu")


@pytest.fixture
def built(csrc_file, monkeypatch):
    """With them in use."""
    monkeypatch.setattr(native, "FILE", csrc_file)
    assert native.serves("cpu")

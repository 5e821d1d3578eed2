"""Megatron on Transformer Engine's layers, on the CPU; only where it is (`make test-te`)."""

import json
from importlib import metadata
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session", autouse=True)
def transformer_engine():
    try:
        metadata.version("transformer_engine_torch")
    except metadata.PackageNotFoundError:
        pytest.skip("Transformer Engine is not installed here; make test-te builds it")


@pytest.fixture(scope="session")
def server(transformer_engine, tmp_path_factory):
    from ranks import IMPORTED, Ranks

    server = Ranks(tmp_path_factory.mktemp("ranks"), ["te_on_cpu", *IMPORTED], HERE)
    yield server
    server.close()


def found_by(done):
    """What each rank printed behind FOUND; every rank came to a good end."""
    assert set(done.codes) == {0}, "\n".join(done.texts)[-4000:]
    return [json.loads(line.split("FOUND ", 1)[1]) for line in done.lines("FOUND ")]


@pytest.fixture(scope="session")
def two(server):
    """`two("function", *arguments)` -> what it returns on two ranks, which is the same on both."""

    def run(function, *arguments):
        done = server.run(2, [function, json.dumps(arguments)], script=HERE / "on_ranks.py")
        first, second = found_by(done)
        assert first == second
        return first

    return run


@pytest.fixture(scope="session")
def train(server):
    """`train(world, "--flag value ...")` -> a `Run` of Megatron-LM's training loop, remembered;
    every rank came to a good end."""
    from ranks import COMMON
    from test_te_training import SHORT

    known = {}

    def run(world, flags):
        if (world, flags) not in known:
            done = server.run(world, [*COMMON, *SHORT, *flags.split()])
            assert done.codes == [0] * world, "\n".join(done.texts)[-3000:]
            known[world, flags] = done
        return known[world, flags]

    return run

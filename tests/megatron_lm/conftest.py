"""Runs of a Megatron-LM script on the CPU; only if `megatron.training` is installed."""

import importlib.util

import pytest
from ranks import COMMON, Ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    models = importlib.util.find_spec("megatron.training.models")
    if models is None or importlib.util.find_spec(f"{models.name}.gpt") is None:
        pytest.skip("train_gpt.py is written for the interface that Megatron-LM has from 0.19 on")
    server = Ranks(tmp_path_factory.mktemp("ranks"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def train(ranks):
    """Return `train(world, "--flag value ...")`, a cached `Run` in which every rank succeeded."""
    runs = {}

    def run(world, flags=""):
        if (world, flags) not in runs:
            done = ranks.run(world, [*COMMON, *flags.split()])
            assert done.codes == [0] * world, "\n".join(done.texts)[-3000:]
            runs[world, flags] = done
        return runs[world, flags]

    return run

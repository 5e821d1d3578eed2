"""Runs of verl's Megatron engine on the CPU, if verl is installed (`make test-verl`)."""

import importlib.metadata
import itertools
from pathlib import Path

import pytest
import torch
from jobs import Jobs


@pytest.fixture(scope="session", autouse=True)
def verl():
    try:
        importlib.metadata.distribution("verl")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("verl is not installed here; make test-verl installs it")


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """Return a function `run(world, words, trajectories, micro_batch, ...)`.

    It returns the exit status, rank 0's output, and the saved results of each rank. One process
    imports verl.
    """
    folder, count = tmp_path_factory.mktemp("jobs"), itertools.count()
    script, variables = Path(__file__).with_name("steps.py"), {"RAY_USAGE_STATS_ENABLED": "0"}
    jobs = Jobs(folder, script, [folder / "model"], variables=variables)

    def job(world, words, trajectories, micro_batch, **extra):
        output = folder / str(next(count))
        work = {"words": words, "trajectories": trajectories, "micro_batch": micro_batch}
        code, texts = jobs.run(world, output=str(output), **work, **extra)
        saved = [Path(f"{output}.{rank}.pt") for rank in range(world)]
        return code, texts[0], [torch.load(one) for one in saved] if code == 0 else None

    yield job
    jobs.close()

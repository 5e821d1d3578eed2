"""Runs of Bridge's diffusion models on the CPU, if they are installed (`make test-verl`)."""

import importlib.util
import json
from functools import cache
from pathlib import Path

import pytest
from diffusion_ranks import RUNS
from jobs import Jobs


@pytest.fixture(scope="session", autouse=True)
def bridge():
    spec = importlib.util.find_spec("megatron")
    homes = [] if spec is None else [Path(home) for home in spec.submodule_search_locations]
    if not any((home / "bridge" / "diffusion").exists() for home in homes):
        pytest.skip("no diffusion models of Megatron-Bridge here; make test-verl installs them")


@pytest.fixture(scope="session")
def result(tmp_path_factory):
    """Return `result(name)`, the JSON that rank 0 of a run of `diffusion_ranks` wrote."""
    folder = tmp_path_factory.mktemp("runs")
    paths = [Path(__file__).parents[2] / "recipes"]
    jobs = Jobs(folder, Path(__file__).with_name("diffusion_ranks.py"), paths=paths)

    @cache
    def read(name):
        output, world = folder / f"{name}.json", RUNS[name][1]
        _, texts = jobs.run(world, name=name, output=str(output))
        assert output.exists(), "".join(texts)[-3000:]
        return json.loads(output.read_text())

    yield read
    jobs.close()

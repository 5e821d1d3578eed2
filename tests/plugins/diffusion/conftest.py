"""Runs of Bridge's diffusion models on the CPU, if they are installed (`make test-verl`)."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LIMIT = 240  # seconds of all runs


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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    here = [str(ROOT), str(ROOT / "tests" / "helpers"), str(ROOT / "tests" / "recipes")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*here, os.environ.get("PYTHONPATH", "")]),
        "PORT": str(port), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    script = Path(__file__).with_name("diffusion_ranks.py")
    done = subprocess.run(
        [sys.executable, str(script), str(folder)], env=environment, cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]

    def read(name):
        output = folder / f"{name}.json"
        assert output.exists(), (folder / f"{name}.log").read_text()[-3000:]
        return json.loads(output.read_text())

    return read

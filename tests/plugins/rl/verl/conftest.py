"""Runs of verl's Megatron engine on the CPU, if verl is installed (`make test-verl`)."""

import importlib.metadata
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[4]
LIMIT = 240  # seconds of a run


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
    paths = [str(ROOT), str(ROOT / "tests" / "helpers"), os.environ.get("PYTHONPATH")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore", "RAY_USAGE_STATS_ENABLED": "0",
    }  # fmt: skip
    command = [sys.executable, str(Path(__file__).with_name("steps.py")), str(folder / "model")]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(
            command, env=environment, cwd=folder, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=log,
        )  # fmt: skip

    def job(world, words, trajectories, micro_batch, **extra):
        output = folder / str(next(count))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        work = {"world": world, "words": words, "trajectories": trajectories}
        work |= {"micro_batch": micro_batch, "port": port, "output": str(output)} | extra
        killer = threading.Timer(LIMIT, server.kill)
        killer.start()
        print(json.dumps(work), file=server.stdin, flush=True)
        answer = server.stdout.readline()
        killer.cancel()
        assert answer, (folder / "server.log").read_text()[-3000:]
        saved = [Path(f"{output}.{rank}.pt") for rank in range(world)]
        results = [torch.load(one) for one in saved] if int(answer) == 0 else None
        return int(answer), Path(f"{output}.0.log").read_text(), results

    yield job
    with server:  # closes its pipes and waits
        pass

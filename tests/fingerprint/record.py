"""Record the results of all calls as hashes, in this process and on two gloo ranks."""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import megatron_burst

from .adapter import results
from .cases import Case, cases

Record = dict[str, dict[str, str]]  # call -> result -> hash
TREE = Path(megatron_burst.__file__).parents[1]  # of the package that is recorded


def record(share: int = 1) -> Record:
    """Results of all calls, or of each kind one of `share`."""
    torch.set_num_threads(1)
    every = cases(share)
    found = {case.name: hashes(case) for case in every if _ranks(case) == 1}
    split = [case for case in every if _ranks(case) > 1]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_on_rank, (folder, split), nprocs=2)
        for rank in range(2):
            for name, some in json.loads(Path(folder, str(rank)).read_text()).items():
                found.setdefault(name, {}).update(
                    {f"rank {rank}: {key}": digest for key, digest in some.items()}
                )
    return {case.name: found[case.name] for case in every}


def _ranks(case: Case) -> int:
    return case.choices.get("tp", 1)


def _on_rank(rank: int, folder: str, split: list[Case]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found = {case.name: hashes(case, dist.group.WORLD) for case in split}
    Path(folder, str(rank)).write_text(json.dumps(found))
    dist.destroy_process_group()


def hashes(case: Case, tp_group: Any = None) -> dict[str, str]:
    """A hash of every result; a call that is refused has none but the kind of its error."""
    try:
        return {name: _hash(value) for name, value in results(case, tp_group)}
    except ValueError as error:
        return {"refused": type(error).__name__}


def _hash(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
        text = f"{value.dtype} {tuple(value.shape)}".encode() + flat.numpy().tobytes()
        return hashlib.blake2b(text, digest_size=8).hexdigest()
    return repr(value)


# --- whole programs -------------------------------------------------------------------------


def quickstart(steps: int = 12) -> Record:
    """The losses of a short quickstart of the recorded tree, step by step."""
    with tempfile.TemporaryDirectory() as folder:
        _run("examples/quickstart.py", "--steps", str(steps), "--seq-length", "512",
             "--compare-steps", "2", "--resume-steps", "2", "--out", folder)  # fmt: skip
        metrics = json.loads(Path(folder, "metrics.json").read_text())
    return {
        f"quickstart {run}": {
            f"step {i}": repr((step.get("loss"), step.get("grad_norm")))
            for i, step in enumerate(steps_of_run)
        }
        for run, steps_of_run in metrics["steps"].items()
    }


def parity(*names: str) -> Record:
    """The largest difference of each combination of `make parity` whose name contains a word."""
    lines = _run("tests/parity/parity.py", *names)
    found = re.findall(r"^(ok|MISS) +(\S.*?) +(\S+) of +(\S+)  (.*?) +\d+ s$", lines, re.MULTILINE)
    return {f"parity {name}": {"result": " ".join(rest)} for _, name, *rest in found}


def _run(script: str, *words: str) -> str:
    """The output of a script of the recorded tree, which may exit with 1 for a missed check."""
    environment = os.environ | {"PYTHONPATH": str(TREE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(TREE / script), *words],
        cwd=TREE, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{script}: exit status {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout

"""Launcher of `pretrain_gpt.py`, or of a script with its flags, and reader of its metrics.

It starts processes on this machine (torchrun, threads per process, files of the error streams), and
searches for the reason of a failure.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).with_name("pretrain_gpt.py")


@dataclass
class Run:
    """Results of one run.

    Attributes:
        startup: The start-up line.
        steps: Metrics of each step, such as loss and grad_norm.
        seconds: Duration, including the start of processes.
    """

    startup: str
    steps: Mapping[int, Mapping[str, float]]
    seconds: float = 0.0

    def curve(self, key: str) -> dict[int, float]:
        """Return one metric by step, such as "loss", "grad_norm" or "tokens_per_s"."""
        return {step: row[key] for step, row in self.steps.items()}


class RunFailed(RuntimeError):
    """Failure of a run; the message contains the reason."""


def read_metrics(path: Path) -> Run:
    """Parse the JSON lines of --metrics.

    Raises:
        ValueError: The file contains no step.
    """
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    steps = {line["step"]: line for line in lines if "step" in line}
    if not steps:
        raise ValueError(f"{path} contains no step: the run ended before its first step")
    startup = next((line["run"]["startup"] for line in lines if "run" in line), "")
    return Run(startup, steps)


def environment(ranks: int, keep_memory: bool = True) -> dict[str, str]:
    """Return the environment of ranks on one machine: no GPU, loopback, a thread per core.

    Megatron's own attention on the CPU allocates matrices of hundreds of MB. Each allocation from
    the system takes longer than the computation of its values, so the process keeps freed memory,
    in huge pages.

    Args:
        ranks: Number of processes.
        keep_memory: If False, freed memory is returned to the system.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    settings = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(max(1, (cores or 1) // ranks))}
    if sys.platform == "linux":
        settings |= {"GLOO_SOCKET_IFNAME": "lo", "THP_MEM_ALLOC_ENABLE": "1"}
    if sys.platform == "linux" and keep_memory:
        settings |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
    return os.environ | settings


def cause(logs: Path) -> str:
    """Return the reason of a failure from the error streams of the ranks below `logs`.

    The traceback of the rank that failed first contains the reason. Errors of other ranks only
    report a lost connection. Without a traceback, the last lines are returned.
    """
    streams = sorted(logs.rglob("stderr.log"), key=lambda path: path.stat().st_mtime)
    streams += logs.glob("launcher.log")
    texts = [path.read_text(errors="replace") for path in streams]
    text = next((text for text in texts if "Traceback (most recent" in text), "\n".join(texts))
    return "\n".join(text.rstrip().splitlines()[-12:]) or "(it printed nothing)"


def train(
    name: str,
    ranks: int,
    flags: list[str],
    folder: Path,
    script: Path | None = None,
    keep_memory: bool = True,
) -> Run:
    """Train on several processes, with the progress on this terminal.

    Args:
        name: Name of the run. Error streams are written to FOLDER/logs/NAME.
        ranks: Number of processes.
        flags: Flags of the script.
        folder: Folder for logs and metrics.
        script: Script of each process; None for `pretrain_gpt.py`.
        keep_memory: Same as in `environment`.

    Returns:
        The metrics of the run.

    Raises:
        RunFailed: A process failed; the message contains the reason from its error stream.
    """
    logs = folder / "logs" / name
    logs.mkdir(parents=True)
    metrics = folder / f"{name}.jsonl"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks)]
    command += ["--log-dir", str(logs), "--redirects", "2"]
    command += [str(script or SCRIPT), *flags, "--metrics", str(metrics)]
    start = time.perf_counter()
    with (logs / "launcher.log").open("w") as errors:
        code = subprocess.run(
            command, stderr=errors, env=environment(ranks, keep_memory)
        ).returncode
    if code:
        raise RunFailed(
            f"The run {name!r} on {ranks} rank{'s' * (ranks > 1)} ended with exit status {code}:\n"
            f"{cause(logs)}\nThe error streams of all ranks are in {logs}"
        )
    run = read_metrics(metrics)
    run.seconds = time.perf_counter() - start
    return run

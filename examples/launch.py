"""Run `pretrain_gpt.py`, or another script with its flags, on some processes of this machine, and
read back what it measured.

Owns how the processes are started (torchrun, threads per process, where error streams go) and
how the reason of a failure is found.
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
    """What one run wrote: its start-up line, and by step a row of loss, grad_norm and so on."""

    startup: str
    steps: Mapping[int, Mapping[str, float]]
    seconds: float = 0.0

    def curve(self, key: str) -> dict[int, float]:
        """`key` ("loss", "grad_norm", "tokens_per_s") by step."""
        return {step: row[key] for step, row in self.steps.items()}


class RunFailed(RuntimeError):
    """A run ended with an error; the message is what a person needs to read."""


def read_metrics(path: Path) -> Run:
    """Parse the JSON lines of --metrics. Raises ValueError when there is not a single step."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    steps = {line["step"]: line for line in lines if "step" in line}
    if not steps:
        raise ValueError(f"{path} holds no step: the run that wrote it ended before its first one")
    startup = next((line["run"]["startup"] for line in lines if "run" in line), "")
    return Run(startup, steps)


def environment(ranks: int, keep_memory: bool = True) -> dict[str, str]:
    """What the ranks of one machine need: no GPU, loopback, and no more threads than cores.

    Megatron's own attention on the CPU makes matrices of hundreds of MB; getting each from the
    system anew takes longer than filling it, so freed memory is kept (unless `keep_memory` is
    False), in huge pages.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    settings = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(max(1, (cores or 1) // ranks))}
    if sys.platform == "linux":
        settings |= {"GLOO_SOCKET_IFNAME": "lo", "THP_MEM_ALLOC_ENABLE": "1"}
    if sys.platform == "linux" and keep_memory:
        settings |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
    return os.environ | settings


def cause(logs: Path) -> str:
    """The reason a run failed, from the error streams its ranks left below `logs`.

    The rank that failed first says most: the others only miss it. Falls back to the last lines.
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
    """Train on `ranks` processes, the table on this terminal; return what --metrics received.

    script: what each process runs, `pretrain_gpt.py` unless another is named. keep_memory: see
    `environment`.

    Error streams go to `folder`/logs/`name`; raises RunFailed with the reason found in them.
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
            f"{cause(logs)}\nAll it printed to its error streams: {logs}"
        )
    run = read_metrics(metrics)
    run.seconds = time.perf_counter() - start
    return run

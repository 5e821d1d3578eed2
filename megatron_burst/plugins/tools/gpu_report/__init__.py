# SPDX-License-Identifier: Apache-2.0
"""`megatron-burst doctor --gpu-report FILE`: write a report that a user with a GPU can send back.

    megatron-burst doctor --gpu-report report.md
    torchrun --nproc-per-node 8 -m megatron_burst doctor --gpu-report report.md   # also overlap

The report contains errors of every kernel against float64, times of kernels, overlap of
communication and compute, versions, and the findings of the doctor. `--device cpu` is a dry run and
is marked as such in the report.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator
from datetime import date
from itertools import chain
from pathlib import Path

import torch
from torch.cuda import nccl

from ....cli.doctor import installed, library, machine, report
from ....cli.doctor.report import Finding, note, ok, status
from ....kernels.flash_packages import PACKAGES as FLASH
from . import accuracy, document, times

FORMAT = 1  # version of the JSON format


def run(path: Path, device_name: str, quick: bool) -> int:
    """Run all checks of the GPU report, and write the file after each section.

    Args:
        path: File of the report, which rank 0 writes.
        device_name: "cuda", or "cpu" for a dry run.
        quick: Skip the checks of installed packages.

    Returns:
        The exit status: 1 if rank 0 found a problem, otherwise 0. Other ranks return 0.

    Raises:
        ValueError: There is no GPU, or the file cannot be written.
    """
    writes = machine.rank() == 0
    check(path if writes else None, device_name)
    device = machine.own_device() if device_name == "cuda" else torch.device("cpu")
    shown = report.Report(as_json=False)
    limit = machine.variables().get("CUDA_DEVICE_MAX_CONNECTIONS")
    facts: document.Facts = {
        "format": FORMAT, "finished": False, "device": device.type, "made": str(date.today()),
        "gpus": machine.gpus() if device.type == "cuda" else [], "versions": versions(device),
        "accuracy": [], "times": [], "overlap": {"CUDA_DEVICE_MAX_CONNECTIONS": limit},
    }  # fmt: skip
    measuring = times.overlap(device, facts["overlap"])
    if not writes:
        list(measuring)
        return 0  # with another status, torchrun would kill rank 0, which reports the findings
    sections: list[tuple[str, Iterable[Finding]]] = [
        ("", _device(facts)),
        ("measuring overlap", measuring),
        ("comparing kernels with float64", accuracy.kernels(device, facts["accuracy"])),
        ("timing kernels", times.kernels(device, facts["times"])),
    ]
    if not quick:
        tried = chain(installed.versions(False), library.library(), installed.hooks())
        sections.append(("trying what is installed", tried))
    for activity, section in sections:
        shown.add(section, activity)
        _write(path, facts, shown)  # a later section may end this process
    facts["finished"] = True
    _write(path, facts, shown)
    shown.add([ok("written", f"{path}: send it to the maintainers; it is short, so read it first")])
    shown.end({})
    return status(shown.findings)


def _write(path: Path, facts: document.Facts, shown: report.Report) -> None:
    facts["findings"] = [finding._asdict() for finding in shown.findings]
    path.write_text(document.text(facts), encoding="utf-8")


def check(path: Path | None, device: str) -> None:
    """Raise ValueError with all reasons why the report cannot be made, if any.

    Args:
        path: File of the report; None on a rank that does not write it.
        device: "cuda" or "cpu".
    """
    problems = []
    if path is not None and (reason := _refused(path)):
        problems.append(f"--gpu-report {path}: {reason}; use a path that can be written")
    if device == "cuda" and not torch.cuda.is_available():
        cuda = torch.version.cuda
        build = f"is built for CUDA {cuda}" if cuda else "is built without CUDA"
        problems.append(
            f"--gpu-report requires a GPU, and torch {torch.__version__}, which {build}, finds "
            "none; check nvidia-smi and CUDA_VISIBLE_DEVICES, and install a CUDA build of torch; "
            "--device cpu is a dry run without information about a GPU"
        )
    if problems:
        raise ValueError("; ".join(problems))


def _refused(path: Path) -> str:
    """Return the reason why a file cannot be written, or "". The file is not changed."""
    try:
        existed = path.exists()
        with path.open("ab"):
            pass
    except IsADirectoryError:
        return "it is a folder"
    except FileNotFoundError:
        return "its folder does not exist"
    except OSError as error:
        return error.strerror or str(error)
    if not existed:
        path.unlink()
    return ""


def versions(device: torch.device) -> dict[str, str]:
    """Return the versions of packages that affect kernels and communication: package -> version.

    The version of an absent package is "-".
    """
    cuda = device.type == "cuda"
    releases = {
        "megatron-burst": installed.version("megatron-burst"),
        "Python": f"{platform.python_version()}, {platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "cuDNN": str(torch.backends.cudnn.version()) if cuda else None,
        "NCCL": ".".join(map(str, nccl.version())) if cuda else None,
        "Megatron-Core": installed.megatron_version(),
        **{name: installed.version(*names) for name, names in installed.PACKAGES.items()},
        **{package.title: package.version for package in FLASH.values()},
    }
    return {name: version or "-" for name, version in releases.items()}


def _device(facts: document.Facts) -> Iterator[Finding]:
    if facts["device"] == "cpu":
        yield note("device", document.DRY)
    for gpu in dict.fromkeys(facts["gpus"]):
        yield ok("device", f"{facts['gpus'].count(gpu)} x {gpu}")

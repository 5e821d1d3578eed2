# SPDX-License-Identifier: Apache-2.0
"""`megatron-burst doctor --gpu-report FILE`: one file that a user with a GPU can send back.

    megatron-burst doctor --gpu-report report.md
    torchrun --nproc-per-node 8 -m megatron_burst doctor --gpu-report report.md    # overlap too

The file has every kernel's errors against float64 and its times, overlap on the real groups,
versions, and the doctor's findings. `--device cpu` is a dry run, and the file says so.
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

FORMAT = 1  # of the JSON


def run(path: Path, device_name: str, quick: bool) -> int:
    """Examine the device and write `path`, anew after each section; under torchrun rank 0 does.

    Returns the exit status: 1 if there is a problem, on rank 0 only. Raises ValueError where there
    is no GPU or no place for the file.
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
        return 0  # whatever the findings: torchrun would end rank 0, which reports them
    sections: list[tuple[str, Iterable[Finding]]] = [
        ("", _device(facts)),
        ("measuring overlap", measuring),
        ("comparing kernels with float64", accuracy.kernels(device, facts["accuracy"])),
        ("timing kernels", times.kernels(device, facts["times"])),
    ]
    if not quick:
        tried = chain(installed.versions(False), library.library(), installed.hooks())
        sections.append(("trying what is installed", tried))
    for doing, section in sections:
        shown.add(section, doing)
        _write(path, facts, shown)  # whatever ends this process next
    facts["finished"] = True
    _write(path, facts, shown)
    shown.add([ok("written", f"{path}: send it back, or read it first: it is short")])
    shown.end({})
    return status(shown.findings)


def _write(path: Path, facts: document.Facts, shown: report.Report) -> None:
    facts["findings"] = [one._asdict() for one in shown.findings]
    path.write_text(document.text(facts), encoding="utf-8")


def check(path: Path | None, device: str) -> None:
    """Raise one ValueError with all that is in the way; path: None on ranks that do not write."""
    wrong = []
    if path is not None and (what := _refused(path)):
        wrong.append(f"--gpu-report {path}: {what}; give a file that can be written")
    if device == "cuda" and not torch.cuda.is_available():
        built = torch.version.cuda
        how = f"is built for CUDA {built}" if built else "is built without CUDA"
        wrong.append(
            f"--gpu-report needs a GPU that torch sees, and torch {torch.__version__}, which {how}"
            ", sees none; check nvidia-smi and CUDA_VISIBLE_DEVICES, and install a CUDA build of "
            "torch; --device cpu is a dry run that says nothing of a GPU"
        )
    if wrong:
        raise ValueError("; ".join(wrong))


def _refused(path: Path) -> str:
    """Why the file cannot be written; empty if it can. Leaves everything as it is."""
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
    """Name -> version of what decides how kernels and communication behave; "-" is absent."""
    cuda = device.type == "cuda"
    releases = {
        "megatron-burst": installed.version("megatron-burst"),
        "Python": f"{platform.python_version()}, {platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "cuDNN": str(torch.backends.cudnn.version()) if cuda else None,
        "NCCL": ".".join(map(str, nccl.version())) if cuda else None,
        "Megatron-Core": installed.megatron_version(),
        **{name: installed.version(*each) for name, each in installed.PACKAGES.items()},
        **{package.title: package.version for package in FLASH.values()},
    }
    return {name: version or "-" for name, version in releases.items()}


def _device(facts: document.Facts) -> Iterator[Finding]:
    if facts["device"] == "cpu":
        yield note("device", document.DRY)
    for gpu in dict.fromkeys(facts["gpus"]):
        yield ok("device", f"{facts['gpus'].count(gpu)} x {gpu}")

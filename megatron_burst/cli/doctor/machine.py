# SPDX-License-Identifier: Apache-2.0
"""This machine: its GPUs, network interfaces, and the environment variables of NCCL and CUDA.

GPUs are those that torch lists. Network interfaces are those in /sys/class, as a container sees
them. The doctor reports the environment; no code of the package depends on it.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import torch

SYS = Path("/sys/class")
VARIABLES = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "NCCL_IB_DISABLE",
    "NCCL_IB_HCA",
    "NCCL_P2P_DISABLE",
    "NCCL_SOCKET_IFNAME",
)


def describe(sys_class: Path = SYS) -> dict[str, Any]:
    """Return host, gpus, nics (name -> speed) and the set variables."""
    return {"host": socket.gethostname(), "gpus": gpus(), "nics": nics(sys_class)} | {
        "variables": variables()
    }


def gpus() -> list[str]:
    """Return name, memory and compute capability of each GPU."""
    if not torch.cuda.is_available():
        return []
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [
        f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor}"
        for gpu in properties
    ]


def nics(sys_class: Path = SYS) -> dict[str, str]:
    """Return network interfaces that are up, and InfiniBand or RoCE adapters: name -> speed.

    Interfaces without hardware (loopback, bridges, veth) are omitted.
    """
    speeds = {}
    for path in _children(sys_class / "infiniband"):
        rates = [_text(port / "rate") for port in _children(path / "ports")]
        speeds[path.name] = "RDMA, " + (", ".join(filter(None, rates)) or "rate unknown")
    for path in _children(sys_class / "net"):
        if (path / "device").exists() and _text(path / "operstate") in ("up", "unknown"):
            speed = _text(path / "speed")
            has_speed = speed.isdigit() and int(speed) > 0
            speeds[path.name] = f"{int(speed) / 1000:g} Gb/s" if has_speed else "speed unknown"
    return speeds


def variables() -> dict[str, str]:
    """Return the set variables of `VARIABLES`."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def launched() -> bool:
    """Return True if a launcher such as torchrun started this process as one of several."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(os.environ)


def rank() -> int:
    """Return the rank of this process; 0 if it is alone."""
    return int(os.environ["RANK"]) if launched() else 0


def world_size() -> int:
    """Return the number of processes that were launched together."""
    return int(os.environ["WORLD_SIZE"]) if launched() else 1


def local_rank() -> int:
    """Return the index of this process's GPU on its node."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def own_device() -> torch.device:
    """Return the GPU of this rank and make it current; the CPU without a GPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank())
    torch.cuda.set_device(device)
    return device


def _children(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # the kernel refuses to read the speed of some interfaces
        return ""

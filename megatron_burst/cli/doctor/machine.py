# SPDX-License-Identifier: Apache-2.0
"""Facts about this machine: GPUs, network interfaces, environment variables of NCCL and CUDA.

GPUs are listed by torch. Network interfaces are read from /sys/class, where a container sees its
own interfaces. Environment variables of NCCL and CUDA are only reported; the package does not
depend on them.
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
    """Return a dict of facts about this machine, with the keys host, gpus, nics and variables."""
    return {"host": socket.gethostname(), "gpus": gpus(), "nics": nics(sys_class)} | {
        "variables": variables()
    }


def gpus() -> list[str]:
    """Return a text per GPU: name, memory and compute capability."""
    if not torch.cuda.is_available():
        return []
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [
        f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor}"
        for gpu in properties
    ]


def nics(sys_class: Path = SYS) -> dict[str, str]:
    """Return the speed of each active network interface and RDMA adapter, by name.

    RDMA adapters are InfiniBand and RoCE. Interfaces without hardware (loopback, bridges, veth) are
    omitted.
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
    """Return the values of the environment variables in `VARIABLES` that are set, by name."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def launched() -> bool:
    """Return True if a launcher such as torchrun started this process."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(os.environ)


def rank() -> int:
    """Return the rank of this process; 0 without a launcher."""
    return int(os.environ["RANK"]) if launched() else 0


def world_size() -> int:
    """Return the number of processes that the launcher started; 1 without a launcher."""
    return int(os.environ["WORLD_SIZE"]) if launched() else 1


def local_rank() -> int:
    """Return the index of this process on its node, which is the index of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def own_device() -> torch.device:
    """Return this rank's GPU and make it torch's current device; without a GPU, return the CPU."""
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
    except OSError:  # Linux returns an error for the speed of some interfaces
        return ""

"""Gloo groups of one process on one network device, and NCCL ranks on one GPU.

torch makes a device for every group, whose thread wakes a hundred times a second. Megatron makes
some forty groups per rank: on two cores, idle threads of four ranks took a tenth of the time, and
far more where several runs of tests left theirs.
"""

import os

import torch
import torch.distributed.distributed_c10d as c10d

Gloo = c10d.ProcessGroupGloo


def share_one_device():
    """From here on, groups that this process makes share a device. The interface is loopback."""
    device = Gloo.create_device(interface="lo")

    class Shared(Gloo):
        def __init__(self, store, rank, size, timeout, **more):
            options = Gloo._Options()
            options._devices, options._timeout = [device], timeout
            super().__init__(store, rank, size, options)

    c10d.ProcessGroupGloo = Shared


def one_gpu(rank):
    """Before NCCL is asked for anything: this rank shares the first GPU with all others."""
    os.environ |= {"NCCL_HOSTID": f"rank {rank}", "NCCL_SOCKET_IFNAME": "lo"}
    torch.cuda.set_device(0)

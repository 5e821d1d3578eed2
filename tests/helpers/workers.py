"""Persistent ranks of gloo or NCCL for the tests: processes that start once and run many functions.

`Workers(n)` starts n processes; `run(function, *args)` calls an importable function on all of
them and returns their results in rank order. It never hangs: processes that do not answer in time
are killed, and the error shows the traceback of every rank that failed and of every one that hung.

NCCL refuses two ranks on one GPU of one host. Here every rank says that it is another host: all use
one GPU, and NCCL goes through sockets, with the same kernels and streams as between nodes.
"""

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.forkserver
import os
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist
from one_device import one_gpu, share_one_device

# The last one brings sympy, which torch imports only with its first operator of some kinds.
IMPORTED = ["torch", "megatron_burst.attention", "torch.fx.experimental.symbolic_shapes"]
# What ranks of `tests/megatron` import, which takes them longer than most tests. The tokenizers
# import transformers. Only names of installed packages, because the server does not have pytest's
# path.
MEGATRON = [
    "megatron_burst.megatron.attention.core_attention", "megatron_burst.megatron.install",
    "megatron_burst.plugins.testing.cpu", "megatron_burst.plugins.testing.delta_net",
    "megatron.core.models.gpt.gpt_layer_specs", "megatron.core.datasets.gpt_dataset",
    "megatron.core.datasets.blended_megatron_dataset_builder", "megatron.core.dist_checkpointing",
    "megatron.core.distributed", "megatron.core.optimizer", "megatron.training.training",
    "megatron.core.models.mimo", "megatron.core.tokenizers.text.models",
    "megatron_burst.megatron.data.loader", "megatron_burst.megatron.lm_head.fused_loss",
    "megatron_burst.megatron.lm_head.mtp", "megatron_burst.megatron.packing.step",
    "megatron_burst.megatron.training", "megatron_burst.plugins.longseq.layer.forward_attention",
    "megatron_burst.plugins.longseq.checks", "megatron_burst.plugins.longseq.patches",
    "megatron_burst.plugins.sparse.megatron.hooks",
    "megatron_burst.plugins.sparse.megatron.index_loss",
    "megatron_burst.plugins.sparse.megatron.patches", "megatron_burst.plugins.testing.local_specs",
    "megatron_burst.kernels.rowwise_code", "megatron_burst.schedule.algorithms.burst",
    "megatron_burst.linear_cross_entropy.tiled_loop", "triton.runtime.interpreter",
]  # fmt: skip
GRACE = 5.0  # seconds that the other ranks get to answer after one has failed


def start_server(imported=()):
    """Start the server that forks ranks, unless it runs; its imports do not delay the caller.

    Args:
        imported: names of modules to import besides `IMPORTED`; absent ones are left out.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED, *imported])
    multiprocessing.forkserver.ensure_running()


class WorkerError(Exception):
    """A rank raised, died or did not answer."""


class Workers:
    """`world` processes with torch.distributed; `timeout` (s) is the group's own."""

    def __init__(self, world, timeout=60, backend="gloo"):
        # The server has imported what ranks need, and forks: starting one costs milliseconds.
        start_server()
        context = multiprocessing.get_context("forkserver")
        self.world = world
        self.alive = True
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self.pipes, self.processes = [], []
        for rank in range(world):
            here, there = context.Pipe()
            arguments = (rank, world, backend, self.store.port, timeout, there, self._trace(rank))
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, function, *args, timeout=60, may_die=()):
        """`function(*args)` on every rank; a rank listed in `may_die` may, and returns None."""
        for pipe in self.pipes:
            pipe.send((function, args, timeout))
        results, failures = [None] * self.world, {}
        waiting = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        deadline = time.monotonic() + timeout + GRACE
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    good, results[rank] = pipe.recv()
                except (EOFError, ConnectionError):
                    good, results[rank] = rank in may_die, None
                    failures |= {} if good else {rank: "died without an answer"}
                    continue
                if not good:
                    failures[rank] = results[rank]
                    deadline = min(deadline, time.monotonic() + GRACE)
        if failures or waiting or may_die:
            late = sorted(waiting.values())
            traces = {rank: self._read_trace(rank) for rank in late}
            self.close()
            if failures or late:
                raise WorkerError(_report(failures, traces))
        return results

    def close(self):
        if not self.alive:
            return
        self.alive = False
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.folder.cleanup()

    def _trace(self, rank):
        return Path(self.folder.name) / f"rank{rank}"

    def _read_trace(self, rank):
        with contextlib.suppress(OSError):
            return self._trace(rank).read_text()
        return ""


def _report(failures, hung):
    parts = [f"--- rank {rank}\n{text}" for rank, text in sorted(failures.items())]
    parts += [f"--- rank {rank} did not answer\n{trace}" for rank, trace in hung.items()]
    return "\n" + "\n".join(parts)


def _serve(rank, world, backend, port, timeout, pipe, trace):
    """The life of one rank: join the group, then answer calls until the pipe closes."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    share_one_device()
    if backend == "nccl":
        one_gpu(rank)
    limit = timedelta(seconds=timeout)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
    with trace.open("w") as file:
        while True:
            try:
                function, args, seconds = pipe.recv()
            except EOFError:
                break
            faulthandler.dump_traceback_later(seconds, file=file)
            try:
                answer = True, function(*args)
            except BaseException:
                answer = False, traceback.format_exc()
            faulthandler.cancel_dump_traceback_later()
            pipe.send(answer)
    os._exit(0)  # no farewell collectives: the other ranks may be gone

"""Ranks of an emulated cluster: one process per namespace, joined by gloo over `ib`.

`Ranks(network)` starts them. `run(function, *args)` calls `function(state, *args)` on all of them
and returns their results in rank order; `answers` also reports ranks that failed, died or hung.
`state` is a dict that exists until the rank ends. No call waits longer than its limit.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .network import Network

PORT = 29500  # port of rank 0's store, in a namespace of its own
NEW_NETWORK = 0x40000000
State = dict[str, Any]


class Answer(NamedTuple):
    """End of a call on one rank.

    The kind is "done" (value: the result), "failed" (type and text of the exception), "died", or
    "hung" (traceback).
    """

    kind: str
    value: Any
    seconds: float


class RankError(RuntimeError):
    """Error of ranks that failed, died or did not answer.

    Attributes:
        kinds, words: Type and message of each exception, in rank order.
        ended: True if a rank died or hung.
    """

    def __init__(self, message: str, failures: Sequence[Answer] = ()):
        super().__init__(message)
        first_lines = [
            str(outcome.value).split("\n", 1)[0] for outcome in failures if outcome.kind == "failed"
        ]
        self.kinds = [line.partition(": ")[0] for line in first_lines]
        self.words = [line.partition(": ")[2] for line in first_lines]
        self.ended = len(first_lines) < len(failures)


class Ranks:
    """Processes of all ranks of a network.

    Args:
        timeout: Timeout of their process groups in seconds.
        preload: Modules that are imported once for all ranks, if installed.
    """

    def __init__(self, network: Network, timeout: float = 60.0, preload: Sequence[str] = ()):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "megatron_burst", "numpy", *preload])
        self.network, self.folder = network, tempfile.TemporaryDirectory(prefix="cluster-")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(network.size):
            parent_pipe, rank_pipe = context.Pipe()
            arguments = (rank, network, timeout, rank_pipe, self._trace(rank))
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            rank_pipe.close()
            self.pipes.append(parent_pipe)
            self.processes.append(process)
        self.run(_ready, within=timeout + 60)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *args: Any, within: float = 300.0) -> list[Any]:
        """Return the results of all ranks; raise RankError with all tracebacks if one failed."""
        outcomes = self.answers(function, *args, within=within)
        failed = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome.kind != "done"}
        if failed:
            words = [
                f"--- rank {rank} {outcome.kind} after {outcome.seconds:.1f} s\n{outcome.value}"
                for rank, outcome in failed.items()
            ]
            raise RankError("\n" + "\n".join(words), list(failed.values()))
        return [outcome.value for outcome in outcomes]

    def answers(
        self,
        function: Callable[..., Any],
        *args: Any,
        within: float,
        meanwhile: Callable[[], None] | None = None,
    ) -> list[Answer]:
        """Return the end of the call on each rank; `meanwhile` is called once all have started."""
        begin = time.monotonic()
        for pipe in self.pipes:
            pipe.send((function, args, within))
        if meanwhile is not None:
            meanwhile()
        waiting = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        outcomes: dict[int, Answer] = {}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, begin + within - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)  # pyright: ignore
                outcomes[rank] = self._answer(rank, time.monotonic() - begin)
        for rank in waiting.values():
            outcomes[rank] = Answer("hung", self._read_trace(rank), time.monotonic() - begin)
        return [outcomes[rank] for rank in range(self.network.size)]

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.folder.cleanup()

    def _answer(self, rank: int, seconds: float) -> Answer:
        try:
            kind, value = self.pipes[rank].recv()
        except (EOFError, ConnectionError):
            return Answer("died", "", seconds)
        return Answer(kind, value, seconds)

    def _trace(self, rank: int) -> Path:
        return Path(self.folder.name) / f"rank{rank}"

    def _read_trace(self, rank: int) -> str:
        path = self._trace(rank)
        return path.read_text() if path.exists() else ""


def _ready(_: State) -> None:
    dist.barrier()


def _serve(rank: int, network: Network, timeout: float, pipe: Connection, trace: Path) -> None:
    """Run one rank: enter its namespace, join the group, answer calls."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the rank ends with the enclosure
    _enter_namespace(rank)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "ib"
    limit = timedelta(seconds=timeout)
    store = dist.TCPStore(network.address(0), PORT, is_master=rank == 0, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=network.size, timeout=limit)
    state: State = {"rank": rank, "network": network}
    gc.disable()  # a pause of one rank would delay all ranks
    gc.freeze()  # collections after each call skip imported modules
    with trace.open("w") as file:
        while True:
            try:
                function, args, within = pipe.recv()
            except EOFError:
                os._exit(0)
            faulthandler.dump_traceback_later(max(0.5, within - 1.0), file=file)
            try:
                reply = "done", function(state, *args)
            except Exception as error:
                words = f"{type(error).__name__}: {error}"
                reply = "failed", f"{words}\n{traceback.format_exc()}"
            faulthandler.cancel_dump_traceback_later()
            gc.collect()
            pipe.send(reply)


def _enter_namespace(rank: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/r{rank}") as namespace:
        if libc.setns(namespace.fileno(), NEW_NETWORK) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace of rank {rank}")

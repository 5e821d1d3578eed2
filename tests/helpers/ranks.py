"""`megatron-burst pretrain --cpu train_gpt.py ...` on forked ranks, as torchrun starts them.

A server forks the ranks (`fork_server`). Unlike torchrun it does not kill ranks if one fails, so
tests see how each rank ends.
"""

import argparse
import contextlib
import functools
import inspect
import multiprocessing
import os
import random
import re
import runpy
import socket
import subprocess
import sys
import types
import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from fork_server import ForkServer, serve
from loaded import load
from one_device import share_one_device
from workers import MEGATRON

from megatron_burst.cli.main import main
from megatron_burst.plugins.testing import cpu

SCRIPT = Path(__file__).parents[1] / "megatron_lm" / "train_gpt.py"
ROOT = Path(__file__).parents[2]
LIMIT = 200  # seconds of a run; a busy machine took 90
# What every run of `SCRIPT` imports, imported before ranks are forked.
IMPORTED = (
    *MEGATRON, "megatron.training.yaml_arguments", "megatron_burst.cli.pretrain",
    "megatron_burst.megatron.linear.delta_net", "megatron_burst.megatron.linear.mamba",
)  # fmt: skip
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(
        filter(None, [os.environ.get("PYTHONPATH"), str(ROOT), str(ROOT / "tests" / "helpers")])
    ),
    "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore",
}  # fmt: skip
PRETRAIN = ["pretrain", "--cpu", str(SCRIPT)]

STEPS, MIDDLE = 4, 2  # of every run, and after how many it evaluates
# Of every run: two layers, steps of two short sequences each.
COMMON = f"""
    --num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --seq-length 64
    --max-position-embeddings 64 --position-embedding-type rope --swiglu --normalization RMSNorm
    --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1
    --global-batch-size 2 --train-iters {STEPS} --eval-interval {MIDDLE} --eval-iters 1 --lr 6e-3
    --log-interval 1 --tokenizer-type NullTokenizer --vocab-size 61
    --make-vocab-size-divisible-by 4 --transformer-impl local --distributed-backend gloo
    --use-cpu-initialization --no-gradient-accumulation-fusion --no-bias-swiglu-fusion
    --no-bias-dropout-fusion --no-masked-softmax-fusion --no-persist-layer-norm --no-rope-fusion
    --num-workers 0 --calculate-per-token-loss --distributed-timeout-minutes 1
""".split()


@dataclass
class Run:
    """The exit status and the output of each rank."""

    codes: list[int]
    texts: list[str]

    @cached_property
    def steps(self):
        """Return iteration -> (loss, gradient norm); the last rank reports them."""
        pattern = r"iteration +(\d+)/.*?lm loss: ([\d.E+-]+) .*?grad norm: ([\d.]+)"
        found = re.findall(pattern, "\n".join(self.texts))
        return {int(step): (float(loss), float(norm)) for step, loss, norm in found}

    @cached_property
    def evaluations(self):
        """Return validation and test losses in the order of their lines."""
        return [float(x) for x in re.findall(r"lm loss value: ([\d.E+-]+)", "\n".join(self.texts))]

    def lines(self, word):
        """Return lines that contain `word`, of all ranks."""
        return [line for text in self.texts for line in text.splitlines() if word in line]


class Ranks:
    """The server, from outside."""

    def __init__(self, folder, imported=IMPORTED, beside=ROOT, tree=None):
        """`imported`: modules that all runs need, found also in the folder `beside`. `tree`: folder
        of another Megatron, which a new interpreter imports."""
        if tree is None:
            self.server = ForkServer.forked(folder, serve_ranks, imported, str(beside))
        else:
            call = f"import ranks; ranks.serve_ranks({[*imported]}, {str(beside)!r})"
            path = os.pathsep.join([str(tree), ENVIRONMENT["PYTHONPATH"]])
            environment = ENVIRONMENT | {"PYTHONPATH": path}
            self.server = ForkServer.launched(folder, [sys.executable, "-c", call], environment)

    def run(self, world, flags, odd=None, script=None, command=PRETRAIN, limit=LIMIT):
        """Run a script with `flags` on every rank.

        odd: additional flags of rank 1. script: runs by itself, with nothing of ours but the
        replacements for a CPU; default: `megatron-burst` with the words of `command`, which is
        `SCRIPT` by the launcher. limit: seconds.
        """
        flags = flags if script else [*command, *flags]
        port = free_port()
        tasks = [
            {"rank": rank, "world": world, "port": port, "script": script and str(script),
             "argv": [*flags, *(odd or [])] if rank == 1 else flags}
            for rank in range(world)
        ]  # fmt: skip
        ended = self.server.run(tasks, limit)
        return Run([rank.code for rank in ended], [rank.output + rank.errors for rank in ended])

    def close(self):
        self.server.close()


def under_torchrun(world, flags):
    """Run the same with torchrun; its ranks share one output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr"]
    command += ["127.0.0.1", "--nproc-per-node", str(world), "-m", "megatron_burst", "pretrain"]
    done = subprocess.run(
        [*command, "--cpu", str(SCRIPT), *flags], text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env=os.environ | ENVIRONMENT, timeout=LIMIT,
    )  # fmt: skip
    return Run([done.returncode], [done.stdout])


def free_port():
    """Return a port below those that the system assigns to connections."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def of_torchrun(rank, world, port):
    """Return the environment variables that torchrun sets for a rank."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in names.items()}


def run_rank(rank, world, port, argv, script):
    """Run one rank in a forked process."""
    os.environ |= of_torchrun(rank, world, port)
    torch.set_num_threads(1)
    share_one_device()
    if script is None:
        return main(argv)
    cpu.enable()
    sys.argv = [script, *argv]
    runpy.run_path(script, run_name="__main__")
    return 0


def fork_managers():
    """Fork the process in which Megatron collects the results of a checkpoint's writers.

    Megatron spawns it, and a spawned process imports torch and Megatron anew on every rank.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    fork = multiprocessing.get_context("fork")
    names = vars(filesystem_async.mp) | {"get_context": lambda method=None: fork}
    filesystem_async.mp = types.SimpleNamespace(**names)


def remember_help():
    """Read the help of Megatron's flags before ranks are forked.

    Megatron parses the source of each class of flags. Every rank would do this twice.
    """
    with contextlib.suppress(ImportError, AttributeError):  # of an older Megatron
        from megatron.training.argument_utils import ArgumentGroupFactory as Factory
        from megatron.training.arguments import add_megatron_arguments

        read = functools.partial(Factory._get_field_docstrings, object.__new__(Factory))
        cached = functools.cache(read)
        Factory._get_field_docstrings = lambda self, of: cached(of)
        # Without the entrance of a patched Megatron, which would install.
        inspect.unwrap(add_megatron_arguments)(argparse.ArgumentParser(allow_abbrev=False))


def serve_ranks(imported, beside):
    """Import modules, then fork ranks."""
    os.environ |= ENVIRONMENT
    warnings.simplefilter("ignore")  # PYTHONWARNINGS is for processes that the ranks start
    sys.path.append(beside)
    load(imported)
    fork_managers()
    remember_help()
    serve(run_rank)

"""`megatron-burst pretrain --cpu train_gpt.py ...` on forked ranks, as torchrun starts them.

As a script this is a server. It imports a module, which takes longer than a run, and forks the
ranks of each run that it reads from its input (JSON lines, one answer each). Unlike torchrun it
does not kill ranks if one fails, so tests see how each rank ends.
"""

import contextlib
import gc
import importlib
import json
import os
import random
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import util
from pathlib import Path

SCRIPT = Path(__file__).with_name("train_gpt.py")
ROOT = Path(__file__).parents[2]
LIMIT = 200  # seconds of a run; a busy machine took 90
# What every run imports besides, imported before ranks are forked. The tokenizers import
# transformers, which takes longer than the steps of a run.
IMPORTED = (
    "megatron.core.tokenizers.text", "megatron.core.datasets.gpt_dataset",
    "megatron_burst.megatron.install", "megatron_burst.megatron.training",
    "megatron_burst.megatron.packing.step", "megatron_burst.plugins.sparse.megatron.hooks",
    "megatron_burst.megatron.linear.delta_net", "megatron_burst.megatron.linear.mamba",
)  # fmt: skip
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(
        filter(None, [os.environ.get("PYTHONPATH"), str(ROOT), str(ROOT / "tests" / "helpers")])
    ),
    "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore",
}  # fmt: skip

STEPS, MIDDLE = 5, 2  # of every run, and after how many it evaluates
# Of every run: two layers, steps of four short sequences each.
COMMON = f"""
    --num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --seq-length 64
    --max-position-embeddings 64 --position-embedding-type rope --swiglu --normalization RMSNorm
    --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1
    --global-batch-size 4 --train-iters {STEPS} --eval-interval {MIDDLE} --eval-iters 1 --lr 3e-3
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
    """The client of the server: `run(world, flags)`."""

    def __init__(self, folder, imported="megatron.training.training", beside=ROOT):
        """Start a server that imports the module `imported`, also from the folder `beside`."""
        self.folder, self.count = folder, 0
        path = os.pathsep.join([ENVIRONMENT["PYTHONPATH"], str(beside)])
        with (folder / "server.log").open("w") as log:
            self.server = subprocess.Popen(
                [sys.executable, __file__, imported], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=log, text=True, env=os.environ | ENVIRONMENT | {"PYTHONPATH": path},
            )  # fmt: skip

    def run(self, world, flags, odd=None, script=None, limit=LIMIT):
        """Run `flags` on every rank, and also `odd` on rank 1.

        `script` runs alone, without our code except the CPU's replacements. A run may take
        ``limit`` seconds.
        """
        self.count += 1
        outputs = [str(self.folder / f"{self.count}-{rank}.log") for rank in range(world)]
        argv = [[*flags, *(odd or [])] if rank == 1 else flags for rank in range(world)]
        asked = {"outputs": outputs, "argv": argv, "script": script and str(script)}
        print(json.dumps(asked | {"limit": limit}), file=self.server.stdin, flush=True)
        answer = self.server.stdout.readline()
        assert answer, (self.folder / "server.log").read_text()
        return Run(json.loads(answer), [Path(path).read_text() for path in outputs])

    def close(self):
        with self.server:  # closes its pipes and waits
            pass


def under_torchrun(world, flags):
    """Run the same with torchrun; its ranks share one output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr"]
    command += ["127.0.0.1", "--nproc-per-node", str(world), "-m", "megatron_burst", "pretrain"]
    done = subprocess.run(
        [*command, "--cpu", str(SCRIPT), *flags], text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env=os.environ | ENVIRONMENT, timeout=LIMIT,
    )  # fmt: skip
    return Run([done.returncode], [done.stdout])


def serve():
    sys.stdout.flush()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        port = free_port()
        children = [
            fork(rank, len(asked["argv"]), port, argv, asked["outputs"][rank], asked["script"])
            for rank, argv in enumerate(asked["argv"])
        ]
        print(json.dumps(wait(children, asked["limit"])), file=answers, flush=True)


def free_port():
    """Return a port below those that the system assigns to connections."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def fork(rank, world, port, argv, output, script):
    child = os.fork()
    if child:
        return child
    log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    code = 1
    share_one_device()
    try:
        code = (
            run_alone(script, argv) if script else main(["pretrain", "--cpu", str(SCRIPT), *argv])
        )
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()  # into the log: os._exit would leave without a word
    finally:
        util._exit_function()  # processes that a rank has started (for a checkpoint) end with it
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_alone(script, argv):
    cpu.enable()
    sys.argv = [script, *argv]
    runpy.run_path(script, run_name="__main__")
    return 0


def wait(children, limit):
    """Return exit codes; processes that exceed the limit are killed (-9)."""
    codes, end = dict.fromkeys(children), time.monotonic() + limit
    while None in codes.values():
        for child in [child for child, code in codes.items() if code is None]:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                codes[child] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.05)
    return list(codes.values())


if __name__ == "__main__":
    from one_device import share_one_device

    from megatron_burst.cli.main import main
    from megatron_burst.plugins.testing import cpu

    importlib.import_module(sys.argv[1])
    for name in IMPORTED:
        with contextlib.suppress(ImportError):  # of a Megatron that is older
            importlib.import_module(name)
    gc.freeze()  # what was imported stays: no rank looks through it for garbage
    serve()

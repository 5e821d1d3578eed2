"""Four gloo ranks with Megatron on the CPU, and a dataset: fixtures of `tests/megatron` and of the
folders `tests/plugins/*/megatron`, whose `conftest.py` import them."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("megatron.core")

import session
from workers import Workers

# What tests of plugins share with others.
sys.path.insert(0, str(Path(__file__).parents[1] / "megatron"))

SEQUENCE = 64
VOCABULARY = 61


CROWDED = 150  # threads of a rank; a run has up to 100, the rest are of groups that torch keeps


def _threads(workers):
    """How many threads the last rank has: process groups wake theirs 100 times a second."""
    return len(list(Path(f"/proc/{workers.processes[-1].pid}/task").glob("*")))


@pytest.fixture(scope="session")
def four(room_pools):
    """`four(function, *args)` on four ranks of their own: Megatron is patched in them."""

    def run(function, *args):
        started = room_pools.setdefault("megatron", [])
        if started and started[-1].alive and _threads(started[-1]) > CROWDED:
            started[-1].close()
        if not started or not started[-1].alive:  # a failed rank takes the others with it
            started.append(Workers(4, timeout=60))
            started[-1].run(session.start, timeout=180)
        return started[-1].run(function, *args, timeout=120)

    yield run
    for workers in room_pools.pop("megatron", ()):
        workers.close()


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Prefix of a small dataset with short documents, so that loss masks are uneven."""
    return write_documents(tmp_path_factory, lambda draw: int(draw.integers(5, 60)))


@pytest.fixture(scope="session")
def even_data(tmp_path_factory):
    """As `data`, with documents of multiples of 8 tokens: 2 x CP divides each."""
    return write_documents(tmp_path_factory, lambda draw: 8 * int(draw.integers(1, 5)))


def write_documents(tmp_path_factory, draw_length):
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = str(tmp_path_factory.mktemp("data") / "text")
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=np.uint16)
    draw = np.random.default_rng(0)
    for _ in range(400):
        length = draw_length(draw)
        steps = draw.integers(1, 4, length - 1).cumsum() % (VOCABULARY - 1)
        document = np.append(steps, VOCABULARY - 1)
        builder.add_document(torch.from_numpy(document), [length])
    builder.finalize(prefix + ".idx")
    with open(prefix + ".json", "w") as file:
        json.dump({"vocab_size": VOCABULARY}, file)
    return prefix


@pytest.fixture(scope="session")
def common(data):
    """Flags of every run: two layers, two steps on four short sequences each. The learning rate is
    not zero in the first step, so that an update of the weights is compared. With weights as
    small as Megatron's by default, attention is nearly uniform, and an error of 10 % in the
    gradient of keys is smaller than the tolerance. Runs of `tests/megatron_lm` have four steps."""
    return (
        f"--data-path {data} --seq-length {SEQUENCE} --eod {VOCABULARY - 1} --eod-mask-loss "
        "--make-vocab-size-divisible-by 4 --num-layers 2 --hidden-size 32 --ffn-hidden-size 48 "
        "--num-attention-heads 4 --micro-batch-size 1 --global-batch-size 4 --train-iters 2 "
        "--lr 3e-3 --lr-warmup-iters 0 --init-method-std 0.2"
    ).split()


@pytest.fixture(scope="session")
def train(four, common):
    """`train("--flag value ...")` -> [(loss, gradient norm)] of the steps, the same on all ranks.

    Without flags it is Megatron's own attention, one sequence per rank. Runs are remembered.
    """
    known = {}

    def run(flags=""):
        flags = " ".join(flags.split())
        if flags not in known:
            results = four(session.train, [*common, *flags.split()])
            assert all(result == results[0] for result in results)
            known[flags] = results[0]
        return known[flags]

    return run

"""Megatron-Core trained on four ranks that share one GPU, through NCCL, equals one rank.

`examples/pretrain_gpt.py` runs with the same data and weights on four ranks and on one: losses and
gradient norms of four steps. The case of the CPU, on forked ranks, is there to try the flags.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from problems import on
from ranks import Ranks

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "pretrain_gpt.py"
BOUND = 2e-5  # relative, of losses in float32
SHAPES = {
    "cuda": "--seq-length 2048 --hidden-size 512 --ffn-hidden-size 1024 --num-attention-heads 8 "
    "--num-query-groups 4 --kv-channels 64 --num-layers 4",
    "cpu": "--seq-length 256 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 "
    "--num-query-groups 2 --num-layers 2",
}
TRAINING = "--global-batch-size 2 --train-iters 4 --lr-warmup-iters 1"
FOUR = "--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
# name: (flags of both, flags of four ranks)
CASES = {
    "store": ("", f"{FOUR} {RECOMPUTE} --burst-attention-store 0.5"),
    "offload": ("", f"{FOUR} {RECOMPUTE} --burst-offload 1.0"),
    "offload of half, with a store": (
        "", f"{FOUR} {RECOMPUTE} --burst-offload 0.5 --burst-attention-store 1.0"),
    "packed": ("--packed", f"{FOUR} --context-parallel-algo multicast"),
    "packed, auto, balanced": (
        "--packed", f"{FOUR} --context-parallel-algo auto --burst-layout balanced"),
    "pieces": (
        "", f"{FOUR} {RECOMPUTE} --burst-sequence-chunks 4 --burst-mlp-tiles 4 "
        "--burst-lm-head-loss single_pass"),
    "head chunks": ("", f"{FOUR} --burst-head-chunks 2"),
    "fused loss, tensor parallel": (
        "", "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 "
        "--burst-lm-head-loss recompute"),
    "pipeline": ("", "--pipeline-model-parallel-size 2 --context-parallel-size 2"),
    "further head": ("--mtp-num-layers 1", FOUR),
    "window, sinks": (
        "--window-size 300,0 --softmax-type learnable",
        f"{FOUR} --context-parallel-algo auto --window-attn-skip-freq 2"),
    "hybrid": (
        "", f"{FOUR} --context-parallel-algo hybrid --burst-ulysses-size 2"),
}  # fmt: skip


def cases():
    yield pytest.param("cpu", "store", marks=pytest.mark.slow)
    for name in CASES:
        yield on("cuda", name)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """What one rank reports, of a device and its flags; made once."""
    kept = {}

    def of(device, flags):
        if (device, flags) not in kept:
            folder = tmp_path_factory.mktemp("one")
            kept[device, flags] = train(device, 1, flags, folder)
        return kept[device, flags]

    return of


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.mark.parametrize(("device", "name"), list(cases()))
def test_four_ranks_train_like_one(device, name, one_rank, tmp_path):
    both, four = CASES[name]
    mine, right = train(device, 4, f"{both} {four}", tmp_path), one_rank(device, both)
    assert len(mine) == len(right) == 4
    assert right[-1]["loss"] < right[0]["loss"]
    for step, other in zip(mine, right, strict=True):
        for what in ("loss", "grad_norm"):
            assert step[what] == pytest.approx(other[what], rel=BOUND), (mine, right)


@pytest.mark.parametrize("device", [on("cuda")])
def test_two_runs_are_bit_equal(device, tmp_path):
    flags = f"--bf16 {FOUR} {RECOMPUTE} --burst-attention-store 0.5 --burst-kernel triton"
    first, second = (train(device, 4, flags, tmp_path / str(i)) for i in range(2))
    assert [step["loss"] for step in first] == [step["loss"] for step in second]


def train(device, ranks, flags, folder):
    """[metrics of each step] of a run; fails with what it printed."""
    folder.mkdir(exist_ok=True)
    prefix = dataset(folder)
    metrics = folder / f"{ranks}.jsonl"
    words = [str(EXAMPLE), "--data-path", str(prefix), "--metrics", str(metrics),
             *SHAPES[device].split(), *TRAINING.split(), *flags.split()]  # fmt: skip
    if device == "cpu":
        server = Ranks(folder, ["pretrain_gpt"], EXAMPLE.parent)
        done = server.run(ranks, words[1:], script=EXAMPLE)
        server.close()
        assert done.codes == [0] * ranks, "\n".join(done.texts)[-6000:]
    else:
        under_torchrun(ranks, [str(Path(__file__).parent / "on_one_gpu.py"), *words], folder)
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def under_torchrun(ranks, words, folder):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks),
               "--master-port", str(port), *words]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
                                "OMP_NUM_THREADS": "1"}  # fmt: skip
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, cwd=folder
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


def dataset(folder):
    """The prefix of a dataset: this repository's own examples."""
    sys.path.insert(0, str(EXAMPLE.parent))
    import prepare_data
    from rich.console import Console

    made = prepare_data.prepare(str(EXAMPLE.parent), folder, 2048, Console(quiet=True))
    return made.prefix

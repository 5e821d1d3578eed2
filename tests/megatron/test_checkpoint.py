"""A checkpoint loads with another context-parallel size and layout, with the same losses.

Megatron writes checkpoints from child processes, which the persistent ranks of the other tests
cannot have: these ranks are forked from a server that has imported everything. One case starts with
torchrun, like a user's run, and imports everything on each rank.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import Ranks

TOLERANCE = 1e-5  # relative, fp32
SCRIPT = Path(__file__).parents[2] / "examples" / "pretrain_gpt.py"
CP2X2 = "--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2"
STRIPED = "--burst-layout striped"

# what is shown -> (ranks and flags of the run that saves, ranks and flags of the one that loads)
CASES = {
    "another cp size and layout": ((4, CP2X2), (2, f"--context-parallel-size 2 {STRIPED}")),
    "sinks": (
        (4, f"{CP2X2} --softmax-type learnable"),
        (1, "--softmax-type learnable"),
    ),
    "one rank": ((2, f"--context-parallel-size 2 {STRIPED}"), (1, "")),
}


@pytest.fixture(scope="module")
def forked(tmp_path_factory):
    """Return `forked(world, flags)`, which runs the example on forked ranks."""
    server = Ranks(tmp_path_factory.mktemp("ranks"), ["pretrain_gpt"], SCRIPT.parent)

    def run(world, flags):
        done = server.run(world, flags, script=SCRIPT)
        assert done.codes == [0] * world, "\n".join(done.texts)[-4000:]

    yield run
    server.close()


def torchrun(world, flags):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr"]
    command += ["127.0.0.1", "--nproc-per-node", str(world), str(SCRIPT), *flags]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(SCRIPT.parents[1])
    }  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-4000:]


def train(run, common, folder, ranks, flags):
    """Return [(step, loss, gradient norm)] of the example on that many processes."""
    metrics = folder / "metrics.jsonl"
    run(ranks, [*common, "--train-iters", "4", *flags.split(), "--metrics", str(metrics)])
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [(row["step"], row["loss"], row["grad_norm"]) for row in lines if "step" in row]


# From two ranks to one goes under torchrun, below.
@pytest.mark.parametrize(
    "case", ["another cp size and layout", pytest.param("sinks", marks=pytest.mark.slow)]
)
def test_a_resumed_run_repeats_the_rest(forked, common, tmp_path, case):
    repeats_the_rest(forked, common, tmp_path, case)


@pytest.mark.slow
def test_a_resumed_run_repeats_the_rest_under_torchrun(common, tmp_path):
    repeats_the_rest(torchrun, common, tmp_path, "one rank")


def repeats_the_rest(run, common, tmp_path, case):
    (ranks, flags), (other_ranks, other_flags) = CASES[case]
    saved = tmp_path / "checkpoint"
    whole = train(run, common, tmp_path, ranks, f"{flags} --save {saved} --save-interval 2")
    assert [step for step, _, _ in whole] == [1, 2, 3, 4]
    other_flags += f" --load {saved} --ckpt-step 2"
    resumed = train(run, common, tmp_path, other_ranks, other_flags)
    assert resumed == [pytest.approx(row, rel=TOLERANCE) for row in whole[2:]]
    at_the_end = tmp_path / "checkpoint" / "latest_checkpointed_iteration.txt"
    assert at_the_end.read_text() == "4"

"""A checkpoint goes on under another context-parallel size and layout, with the same losses.

These runs are started as a user starts them, with torchrun: Megatron writes checkpoints from child
processes, which the persistent ranks of the other tests cannot have.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def torchrun(common, folder, ranks, flags):
    """[(step, loss, gradient norm)] of the example on that many processes."""
    metrics = folder / "metrics.jsonl"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr"]
    command += ["127.0.0.1", "--nproc-per-node", str(ranks), str(SCRIPT), *common, *flags.split()]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(SCRIPT.parents[1])
    }  # fmt: skip
    command += ["--metrics", str(metrics)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [(row["step"], row["loss"], row["grad_norm"]) for row in lines if "step" in row]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_repeats_the_rest(common, tmp_path, case):
    (ranks, flags), (other_ranks, other_flags) = CASES[case]
    saved = tmp_path / "checkpoint"
    whole = torchrun(common, tmp_path, ranks, f"{flags} --save {saved} --save-interval 2")
    assert [step for step, _, _ in whole] == [1, 2, 3, 4, 5]
    resumed = torchrun(common, tmp_path, other_ranks, f"{other_flags} --load {saved} --ckpt-step 2")
    assert resumed == [pytest.approx(row, rel=TOLERANCE) for row in whole[2:]]
    at_the_end = tmp_path / "checkpoint" / "latest_checkpointed_iteration.txt"
    assert at_the_end.read_text() == "5"

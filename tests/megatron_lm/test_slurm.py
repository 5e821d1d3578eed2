"""The Slurm scripts of examples/: the commands that they start, and a run on two "nodes".

A replacement of srun starts two CPU ranks for each node on this machine.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import COMMON, ENVIRONMENT, LIMIT, ROOT, SCRIPT, free_port

from megatron_burst.plugins.tools.advise.search import job

SLURM = ROOT / "examples" / "slurm"
SCRIPTS = sorted(SLURM.glob("*.sbatch"))
STAND_INS = {
    # Everything after the options once per node, at the same time.
    "srun": """
        shift; for node in 0 1; do SLURM_NODEID=$node "$@" & pids+=($!); done
        for pid in "${pids[@]}"; do wait "$pid" || status=$?; done; exit "${status:-0}" """,
    "scontrol": 'test "$*" = "show hostnames first,second"; echo 127.0.0.1; echo 127.0.0.1',
    # Megatron-LM on the CPU is the only difference.
    "torchrun": f"""
        for word; do words+=("$word"); [ "$word" != pretrain ] || words+=(--cpu); done
        exec {sys.executable} -m torch.distributed.run "${{words[@]}}" """,
}


def submit(folder, script, *words, torchrun=None, **variables):
    """Run a script as sbatch would, with replacements on the PATH."""
    bin = folder / "bin"
    bin.mkdir(exist_ok=True)
    for name, body in (STAND_INS | ({"torchrun": torchrun} if torchrun else {})).items():
        (bin / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (bin / name).chmod(0o755)
    slurm = {
        "SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "first,second", "SLURMD_NODENAME": "127.0.0.1",
        "PATH": f"{bin}{os.pathsep}{os.environ['PATH']}", "PORT": str(free_port()),
    }  # fmt: skip
    return subprocess.run(
        ["bash", str(SLURM / script), *words], text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env=os.environ | ENVIRONMENT | slurm | variables, timeout=LIMIT,
    )  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_bash_reads_it(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    checker = shutil.which("shellcheck") or shutil.which(
        "shellcheck", path=Path(sys.executable).parent
    )
    if checker:
        subprocess.run([checker, str(script)], check=True)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_it_starts_ranks_as_the_scripts_of_advise_do(script):
    text = script.read_text()
    assert job.LAUNCH in text
    assert job.DIRECTIVES in text
    assert f"#SBATCH --cpus-per-task={8 * job.CPUS}\n" in text


def started(folder, script, *words, ends="exit 0", **variables):
    """Return (exit status, the words of node 0's commands), of a torchrun that starts nothing."""
    said = folder / "said"
    body = f'[ "$SLURM_NODEID" = 1 ] || echo "$*" >> {said}; {ends}'
    done = submit(folder, script, *words, torchrun=body, **variables)
    return done.returncode, [line.split() for line in said.read_text().splitlines()]


def value(words, flag, count=1):
    at = words.index(flag) + 1
    return " ".join(words[at : at + count])


@pytest.mark.parametrize(
    ("variables", "cp", "sizes"),
    [
        ({}, "16", "8 2"),
        ({"TP": "4"}, "4", "2 2"),
        ({"CP": "8"}, "8", None),
        ({"TP": "8"}, "2", None),
    ],
)
def test_what_starts_on_each_node(tmp_path, variables, cp, sizes):
    shutil.copy(SLURM / "llama3_8b_128k.txt", tmp_path)
    code, (doctor, train) = started(
        tmp_path, "megatron_lm.sbatch", "--train-iters", "7", MEGATRON_LM="/m", DATA="/d/text",
        TOKENIZER="/t", **variables,
    )  # fmt: skip
    assert code == 0
    for words in (doctor, train):
        assert value(words, "--nnodes") == "2"
        assert value(words, "--nproc-per-node") == "8"
        assert value(words, "--rdzv-endpoint").startswith("127.0.0.1:")
        assert value(words, "--rdzv-conf") == "is_host=1"
        assert value(words, "--context-parallel-size") == cp
    assert value(doctor, "-m", 3) == "megatron_burst doctor --distributed"
    assert value(train, "-m", 3) == "megatron_burst pretrain /m/pretrain_gpt.py"
    assert ("--hierarchical-context-parallel-sizes" in train) == (sizes is not None)
    if sizes:
        assert value(train, "--hierarchical-context-parallel-sizes", 2) == sizes
    assert value(train, "--save") == value(train, "--load") == str(tmp_path / "checkpoints")
    assert train[-2:] == ["--train-iters", "7"]
    assert "#" not in " ".join(train)


def test_what_a_recipe_starts(tmp_path):
    code, (doctor, train) = started(tmp_path, "bridge.sbatch", "train.train_iters=7")
    assert code == 0
    assert value(doctor, "-m", 3) == "megatron_burst doctor --distributed"
    assert value(train, "-m", 3) == "megatron_burst recipe llama3_8b_pretrain_32gpu_h100_1m"
    folder = tmp_path / "checkpoints"
    told = [f"checkpoint.save={folder}", f"checkpoint.load={folder}", "train.train_iters=7"]
    assert train[-3:] == told


@pytest.mark.parametrize("script", [path.name for path in SCRIPTS])
def test_problems_that_the_doctor_finds_end_the_job(tmp_path, script):
    shutil.copy(SLURM / "llama3_8b_128k.txt", tmp_path)
    code, commands = started(tmp_path, script, ends="exit 1", MEGATRON_LM="/m", DATA="/d")
    assert code == 1
    assert len(commands) == 1


def test_flags_that_cannot_be_read_end_the_job_before_the_doctor(tmp_path):
    done = submit(tmp_path, "megatron_lm.sbatch", torchrun="echo started", MEGATRON_LM="/m")
    assert done.returncode == 2
    assert done.stdout == f"FLAGS: {tmp_path}/llama3_8b_128k.txt is not readable\n"


megatron_lm = pytest.mark.skipif(
    importlib.util.find_spec("megatron.training") is None
    or importlib.util.find_spec("megatron.training.models") is None,
    reason="train_gpt.py is written for the interface that Megatron-LM has from 0.19 on",
)


def train(folder):
    """Run the script; the job ends after every second of four steps."""
    (folder / "flags.txt").write_text("# a tiny model\n" + " ".join(COMMON))
    done = submit(
        folder, "megatron_lm.sbatch", "--train-iters", "4", "--exit-interval", "2",
        "--save-interval", "2",
        "--eval-iters", "0", SCRIPT=str(SCRIPT), GPUS="2",
        FLAGS=str(folder / "flags.txt"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


@megatron_lm
@pytest.mark.slow
def test_two_nodes_of_two_ranks_train(tmp_path):
    text = train(tmp_path)
    assert "2 per node x 2 nodes" in text
    assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "2"


@megatron_lm
@pytest.mark.slow
def test_a_job_that_is_requeued_goes_on(tmp_path):
    train(tmp_path)
    steps = re.findall(r"iteration +(\d+)/", train(tmp_path))
    assert steps == ["3", "4"]

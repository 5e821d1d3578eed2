# SPDX-License-Identifier: Apache-2.0
"""Script for Slurm's sbatch that trains with the settings of a run (`advise --sbatch`).

The scripts in examples/slurm/ contain copies of `LAUNCH` and `DIRECTIVES`; a test checks that they
are equal.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import PurePath

from .....units import duration
from ..settings import Settings
from ..shapes.model import Model
from .model_flags import lacking, script_of
from .pasted import DOCUMENTS, flags_of, left_to_the_user

CPUS = 8  # CPUs per GPU, for two Python threads, NCCL's threads and workers of the data loader
START = 30 * 60  # seconds to start a job, run the doctor, build the model and save a checkpoint
SAVE = 10 * 60  # seconds that Megatron-LM has to save before the time limit
BETWEEN = 30 * 60  # seconds between checkpoints
UNSET = "SET_ME"  # a time limit that sbatch refuses

DIRECTIVES = """\
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail
"""

# Requires the shell variable GPUS, the number of GPUs per node.
LAUNCH = """\
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export GPUS RENDEZVOUS="${hosts[0]}:${PORT:-29500}"
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then
  export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun does not inherit --cpus-per-task
fi

# One torchrun per node; the first node holds the rendezvous.
on_all_nodes() {
  # shellcheck disable=SC2016 # expanded on each node
  srun --kill-on-bad-exit=1 bash -c 'exec torchrun --nnodes "$SLURM_JOB_NUM_NODES" \\
    --nproc-per-node "$GPUS" --local-addr "$SLURMD_NODENAME" --rdzv-id "$SLURM_JOB_ID" \\
    --rdzv-backend c10d --rdzv-endpoint "$RENDEZVOUS" \\
    --rdzv-conf "is_host=$((SLURM_NODEID == 0))" "$@"' torchrun "$@"
}
"""

JOB = """\
#!/usr/bin/env bash
# {summary}; a step is predicted to take {step}.
#     MEGATRON_LM=/path/to/Megatron-LM sbatch FILE --data-path PREFIX ...
{missing}# Submitted again or requeued, the job continues from the latest checkpoint in CHECKPOINTS.
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
# {cpus_each} for each GPU; use fewer if your nodes have fewer.
#SBATCH --cpus-per-task={cpus}
#SBATCH --gpus-per-node={per_node}
#SBATCH --exclusive
{time}{directives}
CHECKPOINTS=${{CHECKPOINTS:-$SLURM_SUBMIT_DIR/{name}-checkpoints}}
SCRIPT=${{MEGATRON_LM:?must name a checkout of Megatron-LM}}/{script}
GPUS={per_node} # per node

{connections}export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={save} # seconds to save after a signal, not 30
{launch}
# Problems that the doctor finds end the job here.
{doctor}

# Megatron-LM saves and exits when it gets SIGTERM, and before the time limit of the job.
stop=(--exit-signal-handler)
if [ -n "${{SLURM_JOB_END_TIME:-}}" ]; then
  minutes=$(((SLURM_JOB_END_TIME - $(date +%s)) / 60 - {reserve}))
  stop+=(--exit-duration-in-mins "$((minutes > 1 ? minutes : 1))")
fi
on_all_nodes -m megatron_burst pretrain "$SCRIPT" \\
  {flags} \\
  --save "$CHECKPOINTS" --load "$CHECKPOINTS" --save-interval {interval} \\
  "${{stop[@]}}" "$@"
"""
DOCTOR = """\
on_all_nodes -m megatron_burst doctor --distributed --tensor-model-parallel-size {tp} \\
  --context-parallel-size {cp} --gpus-per-node "$GPUS"\
"""
# Without context parallelism there are no rings to check.
ONE_RANK = "srun --kill-on-bad-exit=1 megatron-burst doctor --quick"


def job_of(
    model: Model, run: Settings, nodes: int, per_node: int, summary: str, cut: str,
    step: tuple[float, float], train_iters: int | None = None,
) -> str:  # fmt: skip
    """Return a script for sbatch that trains with `flags_of(model, run, cut)`.

    Arguments of the script are appended to these flags.

    Args:
        model: Shape of the model.
        run: Settings of the run.
        nodes: Number of nodes of the job.
        per_node: Number of GPUs of each node.
        summary: Description of the job in one line.
        cut: Layout of packed documents; "" without packed documents.
        step: Predicted seconds of a step, and the upper end of the range of the prediction.
        train_iters: Number of training steps, from which the time limit is computed. None writes
            `SET_ME` instead of a time limit.
    """
    included = ["checkpoints"] + ["--train-iters"] * (train_iters is not None)
    missing = [left_to_the_user(model, included), *lacking(model)]
    missing += [DOCUMENTS[cut]] if cut else []
    flags = flags_of(model, run, cut)
    if train_iters is not None:
        flags.append(f"--train-iters {train_iters}")
    return JOB.format(
        summary=" ".join(summary.split()),
        step=duration(step[0]),
        missing="".join(f"# {sentence}\n" for sentence in missing),
        name=job_name(model.name),
        nodes=nodes,
        cpus_each=CPUS,
        cpus=CPUS * per_node,
        per_node=per_node,
        time="".join(f"{line}\n" for line in _time(step[1], train_iters)),
        directives=DIRECTIVES,
        script=script_of(model),
        connections="export CUDA_DEVICE_MAX_CONNECTIONS=1 # required before Blackwell\n"
        if run.sets_one_queue
        else "",
        save=SAVE,
        launch=LAUNCH,
        doctor=DOCTOR.format(tp=run.tp, cp=run.cp) if run.cp > 1 else ONE_RANK,
        reserve=math.ceil((SAVE + step[1]) / 60),
        flags=" \\\n  ".join(flags),
        interval=max(1, round(BETWEEN / step[0])),
    )


def job_name(model: str) -> str:
    """Return the name of a job, which is also part of the name of its checkpoint folder.

    Args:
        model: Name of the model, or path of its config.json.
    """
    path = PurePath(model)
    last = path.parent.name if path.name == "config.json" else path.name
    return re.sub(r"[^\w.-]+", "-", last, flags=re.ASCII).strip("-.") or "burst"


def _time(longest: float, train_iters: int | None) -> Iterator[str]:
    """Yield the lines with the time limit; `longest` is the maximum seconds of a step."""
    if train_iters is None:
        yield f"# SET_ME: the number of steps x {duration(longest)}, the upper end of the forecast,"
        yield f"# and {duration(START)} to start and save. sbatch refuses the file until it is set."
        yield f"#SBATCH --time={UNSET}"
        return
    yield f"# {train_iters:,} steps of up to {duration(longest)}, the upper end of the forecast,"
    yield f"# and {duration(START)} to start and save. With a shorter limit, submit the file again."
    yield f"#SBATCH --time={time_limit(train_iters * longest + START)}"


def time_limit(seconds: float) -> str:
    """Return a duration in Slurm's notation, rounded up to minutes, such as "1-02:30:00"."""
    hours, minutes = divmod(math.ceil(seconds / 60), 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02}:{minutes:02}:00"

"""Distributed checkpoints that load under any context-, tensor- or pipeline-parallel size.

The module defines the content of a checkpoint, and follows Megatron's directory convention
(DIR/iter_0000010, DIR/latest_checkpointed_iteration.txt).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

_LATEST = "latest_checkpointed_iteration.txt"


def save(root: str, iteration: int, consumed: int, stages: Any, optimizer: Any, schedule: Any):
    """Save the model stages, optimizer, schedule, iteration and consumed samples. Collective."""
    folder = Path(root) / f"iter_{iteration:07d}"
    folder.mkdir(parents=True, exist_ok=True)
    state = _sharded_state(stages, optimizer, schedule, is_loading=False)
    state |= {"iteration": iteration, "consumed_samples": consumed}
    torch.distributed.barrier()
    dist_checkpointing.save(state, str(folder))
    if torch.distributed.get_rank() == 0:
        (Path(root) / _LATEST).write_text(str(iteration))
    torch.distributed.barrier()


def load(
    root: str, iteration: int | None, stages: Any, optimizer: Any, schedule: Any
) -> tuple[int, int]:
    """Restore a checkpoint of `save`. Collective.

    Args:
        root: Folder of the checkpoints.
        iteration: Iteration of the checkpoint; None for the latest.
        stages: Model stages of this rank.
        optimizer: Optimizer of Megatron-Core.
        schedule: Learning-rate schedule.

    Returns:
        The iteration, and the number of consumed samples.

    Raises:
        ValueError: The checkpoint does not exist, or this optimizer cannot be restored.
    """
    _check_restorable(optimizer)
    latest = Path(root) / _LATEST
    if iteration is None and not latest.exists():
        raise ValueError(f"--load {root} contains no checkpoint: {latest} does not exist")
    folder = Path(root) / f"iter_{iteration or int(latest.read_text()):07d}"
    if not folder.exists():
        raise ValueError(f"--load {root} --ckpt-step {iteration}: {folder} does not exist")
    template = _sharded_state(stages, optimizer, schedule, is_loading=True)
    state = dist_checkpointing.load(template, str(folder))
    for name, stage in _named(stages).items():
        stage.module.load_state_dict(state[name])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    return state["iteration"], state["consumed_samples"]


def _check_restorable(optimizer: Any) -> None:
    for part in optimizer.chained_optimizers:
        if isinstance(part, DistributedOptimizer) and isinstance(part.optimizer, torch.optim.Adam):
            raise ValueError(
                "--load with --use-distributed-optimizer: Megatron-Core restores the distributed "
                "optimizer only with Apex or Transformer Engine installed, not torch's Adam; "
                "train without --use-distributed-optimizer, or install one of them"
            )


def _named(stages: list[Any]) -> dict[str, Any]:
    """Return the stages by Megatron's names: "model", or "model0", "model1", and so on."""
    if len(stages) == 1:
        return {"model": stages[0]}
    return {f"model{i}": stage for i, stage in enumerate(stages)}


def _sharded_state(stages: Any, optimizer: Any, schedule: Any, is_loading: bool) -> dict[str, Any]:
    metadata = {
        # Only this optimizer format loads on another number of data-parallel ranks. For the
        # distributed optimizer, context-parallel ranks are data-parallel ranks.
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    weights = {
        name: stage.module.sharded_state_dict(metadata=metadata)
        for name, stage in _named(stages).items()
    }
    return weights | {
        "optimizer": optimizer.sharded_state_dict(weights, is_loading, metadata=metadata),
        "schedule": schedule.state_dict(),
    }

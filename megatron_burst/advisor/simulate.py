"""`mb.simulate`: how long one attention call, one layer or one step takes, from plain numbers.

The public door of the model of time; `advise` and the fits of the documentation use the same code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from . import cluster_file
from .clusters import Cluster, gpu
from .forecast.attention_time import attention_time
from .forecast.faults import Faults
from .forecast.layer_time import layer_time
from .forecast.step_time import step_time
from .forecast.stragglers import layer_under, step_under
from .settings import Settings, check
from .shapes import models
from .shapes.models import Model

Part = Literal["attention", "layer", "step"]


def simulate(
    model: str | Model,
    cluster: str | Path | Cluster,
    run: Settings,
    *,
    part: Part = "step",
    faults: Faults | None = None,
) -> Any:
    """Predict the time of a part of a run.

    model: a name, the path of a Hugging Face `config.json`, or `mb.Model`. cluster: the
    name of a GPU (as many as the run takes, 8 a node), the path of a cluster file, or `mb.Cluster`.
    part: "attention" (one call of one layer, forward and backward: `AttentionTime`), "layer" or
    "step". faults: what is slower than `cluster` says. Every result has `seconds` and
    `bottleneck`. Raises ValueError for settings that no run could have, and for a run that the
    cluster has too few GPUs for.
    """
    model = models.named(model) if isinstance(model, str) else model
    check(model, run)
    if not isinstance(cluster, Cluster):
        from_file = str(cluster).endswith(".toml")
        cluster = cluster_file.read(cluster) if from_file else Cluster(gpu(str(cluster)), run.gpus)
    _check_groups(cluster, run, faults)
    if part == "attention":
        return attention_time(model, cluster, run, faults)
    if part == "layer":
        return (
            layer_under(model, cluster, run, faults) if faults else layer_time(model, cluster, run)
        )
    if part == "step":
        _check_turns(run)
        return step_under(model, cluster, run, faults) if faults else step_time(model, cluster, run)
    raise ValueError(f"part must be attention, layer or step, got {part!r}")


def _check_groups(cluster: Cluster, run: Settings, faults: Faults | None) -> None:
    """Raise ValueError where the run has more ranks than GPUs, or a fault is of a GPU without."""
    if run.gpus > cluster.gpus:
        raise ValueError(
            f"the run takes {run.gpus} GPUs (--tp {run.tp} x --cp {run.cp} x --pp {run.pp} x --dp "
            f"{run.dp}), the cluster has {cluster.gpus}: take smaller groups, or a cluster of "
            f"{run.gpus}"
        )
    if faults is not None:
        faults.check(cluster)
        faults.check_run(run.gpus)


def _check_turns(run: Settings) -> None:
    """Raise ValueError where interleaved stages have no whole rounds of micro-batches."""
    if run.vpp > 1 and run.micro_batches % run.pp:
        near = -(-run.micro_batches // run.pp) * run.pp
        raise ValueError(
            f"--micro-batches {run.micro_batches}: with --vpp {run.vpp} Megatron needs a multiple "
            f"of --pp {run.pp}: take {near}, say"
        )

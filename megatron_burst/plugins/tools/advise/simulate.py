# SPDX-License-Identifier: Apache-2.0
"""`mb.simulate`: predict the time of one attention call, one layer or one step.

This is the public interface to the predictions that `advise` also uses.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ....autotune import cluster_file
from ....autotune.clusters import Cluster, gpu
from ....autotune.gpus import assumed_kernel
from .forecast.attention_time import AttentionTime, attention_time
from .forecast.layer_time import LayerTime, layer_time
from .forecast.step_time import StepTime, step_time
from .settings import Settings, check, uneven_rounds
from .shapes import models
from .shapes.model import Model

Simulated = Literal["attention", "layer", "step"]


def simulate(
    model: str | Model,
    cluster: str | Path | Cluster,
    run: Settings,
    *,
    part: Simulated = "step",
) -> Any:
    """Predict the time of a training step, or of a part of it.

    Args:
        model: Name of a model, path of a Hugging Face `config.json`, or `mb.Model`.
        cluster: Name of a GPU, path of a cluster file, or `mb.Cluster`. A name stands for a cluster
            with 8 GPUs per node and as many GPUs as the run needs.
        run: Settings of the run.
        part: "attention" (one call, forward and backward), "layer" or "step".

    Returns:
        `AttentionTime`, `LayerTime` or `StepTime`, with `seconds`, `bottleneck` and `kernel`.

    Raises:
        ValueError: The settings are impossible, or the cluster has too few GPUs.
    """
    model = models.named(model) if isinstance(model, str) else model
    check(model, run)
    if not isinstance(cluster, Cluster):
        from_file = str(cluster).endswith(".toml")
        cluster = cluster_file.read(cluster) if from_file else Cluster(gpu(str(cluster)), run.gpus)
    _check_groups(cluster, run)
    kernel = None if cluster.kernels_measured else assumed_kernel(cluster.gpu)
    return replace(_simulated(model, cluster, run, part), kernel=kernel)


def _simulated(
    model: Model, cluster: Cluster, run: Settings, part: Simulated
) -> AttentionTime | LayerTime | StepTime:
    if part == "attention":
        if run.by_kind:
            raise ValueError(
                f"window_algorithm {run.window_algorithm}, chunk_algorithm {run.chunk_algorithm}: "
                "part='attention' predicts one call with one algorithm; set algorithm, and set "
                "these two to None"
            )
        return attention_time(model, cluster, run)
    if part == "layer":
        return layer_time(model, cluster, run)
    if part == "step":
        if problem := uneven_rounds(run):
            raise ValueError(problem)
        return step_time(model, cluster, run)
    raise ValueError(f"part must be attention, layer or step, got {part!r}")


def _check_groups(cluster: Cluster, run: Settings) -> None:
    """Raise ValueError if the run has more ranks than the cluster has GPUs."""
    if run.gpus > cluster.gpus:
        raise ValueError(
            f"the run requires {run.gpus} GPUs (--tp {run.tp} x --cp {run.cp} x --pp {run.pp} x "
            f"--dp {run.dp}), and the cluster has {cluster.gpus}; use smaller parallel sizes, or "
            f"a cluster of {run.gpus} GPUs"
        )

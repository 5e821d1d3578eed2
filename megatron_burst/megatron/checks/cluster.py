"""Problems of `--burst-cluster`: a file that cannot be read, or that nothing asks for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_burst.advisor import cluster_file
from megatron_burst.config import OFF, BurstConfig
from megatron_burst.megatron.checks.linear import linear_layers
from megatron_burst.megatron.checks.problem import Problem


def cluster_problems(burst: BurstConfig, config: Any = None) -> Iterator[Problem]:
    """Unless the file is one of `megatron-burst calibrate` and "auto" will read it: that of
    attention or, in a model of this ``config``, that of layers that carry a state."""
    if burst.cluster is None:
        return
    flag = f"--burst-cluster {burst.cluster}"
    states = burst.linear == "auto" and burst.algorithm != OFF and linear_layers(config)
    if burst.algorithm != "auto" and not states:
        yield Problem(
            f"{flag} is for --context-parallel-algo auto, and {burst.algorithm} needs no rates",
            remove=("--burst-cluster",),
        )
    try:
        cluster_file.read(burst.cluster)
    except ValueError as error:
        missing = not Path(burst.cluster).is_file()
        yield Problem(f"--burst-cluster {error}{'; every node needs the file' * missing}")

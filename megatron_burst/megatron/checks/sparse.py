# SPDX-License-Identifier: Apache-2.0
"""Sparse attention (Megatron's DSA) in the settings of a model.

The plugin `sparse` checks and runs these layers. Without it a model that has some is refused,
because Megatron's own all-gather would take our tokens for zigzag ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ... import registry
from ...config import OFF, BurstConfig
from ..model_shape import ModelShape
from .problem import Problem, plugin_problems
from .splitting import splits


def gathers(config: Any) -> bool:
    """Whether Megatron's exchange of keys and values is the only one that its own DSA takes."""
    kinds = getattr(config, "cp_comm_type", None)
    kinds = kinds if isinstance(kinds, (list, tuple)) else [kinds]
    return all(kind is not None and kind.replace("_", "").lower() == "allgather" for kind in kinds)


def sparse_problems(config: Any, burst: BurstConfig) -> Iterator[Problem]:
    """Problems of a model with sparse attention that is split over ranks.

    Args:
        config: a `TransformerConfig`, or any object with attributes of the same names.
        burst: the options of the run.
    """
    setting = ModelShape.of(config).sparse_setting
    if setting is None or not splits(config):
        return
    problems = registry.optional("sparse_problems")
    if problems is not None:
        yield from problems(config, burst, setting)
    elif burst.algorithm != OFF:
        keep = (f"--context-parallel-algo {OFF}",)
        yield from plugin_problems("sparse_problems", setting, add=keep)

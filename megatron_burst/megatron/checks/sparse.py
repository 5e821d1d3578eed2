# SPDX-License-Identifier: Apache-2.0
"""Checks of sparse attention (Megatron's DSA).

The plugin `sparse` checks and runs these layers. Without the plugin, a model with DSA is refused:
Megatron's own all-gather of keys assumes the zigzag layout, whatever layout the run uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ... import registry
from ...config import OFF, BurstConfig
from ..model_shape import ModelShape
from ..selection import splits
from .problem import Problem, plugin_problems


def gathers(config: Any) -> bool:
    """Return whether every entry of `cp_comm_type` is the all-gather that DSA requires."""
    kinds = getattr(config, "cp_comm_type", None)
    kinds = kinds if isinstance(kinds, (list, tuple)) else [kinds]
    return all(kind is not None and kind.replace("_", "").lower() == "allgather" for kind in kinds)


def sparse_problems(config: Any, burst: BurstConfig) -> Iterator[Problem]:
    """Yield the problems of sparse attention in a model with several context-parallel ranks.

    Args:
        config: a `TransformerConfig`, or any object with attributes of the same names.
        burst: the options of the run.

    Yields:
        The problems.
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

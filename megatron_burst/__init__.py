# SPDX-License-Identifier: Apache-2.0
"""megatron_burst: BurstAttention context parallelism for an unmodified Megatron.

Public names are imported when they are first used: what needs no torch (masks, layouts,
schedules, forecasts) works without it. Importing the package changes nothing.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import layout, masks, trees
    from .attention import attention
    from .autotune.clusters import Cluster
    from .autotune.gpus import Gpu
    from .autotune.measure import measure_rates
    from .autotune.rates import Rates
    from .autotune.select import Choice, choose
    from .comm.groups import Groups
    from .config import BurstConfig
    from .layout.sharding import shard, unshard
    from .linear_attention.operation import linear_attention
    from .linear_attention.plan import LinearPlan, prepare_linear
    from .linear_attention.short_convolution import short_convolution
    from .linear_attention.state_scan import state_scan
    from .linear_cross_entropy import linear_cross_entropy, linear_kl, linear_logprobs
    from .planning.plan import Plan
    from .planning.prepare import prepare
    from .recompute.checkpoint import checkpoint
    from .recompute.host.mover import HostMemory
    from .recompute.tiles import tiled
    from .sparse import Selection, indexer_loss, select, sparse_attention
    from .tools.advise.advice import Advice, advise
    from .tools.advise.settings import Settings
    from .tools.advise.shapes.model import Model
    from .tools.advise.simulate import simulate

__version__ = "0.1.0"

# Public name -> its module; a name that is a module itself is imported as such.
_HOMES = {
    "Advice": "tools.advise.advice",
    "BurstConfig": "config",
    "Choice": "autotune.select",
    "Cluster": "autotune.clusters",
    "Gpu": "autotune.gpus",
    "Groups": "comm.groups",
    "HostMemory": "recompute.host.mover",
    "LinearPlan": "linear_attention.plan",
    "Model": "tools.advise.shapes.model",
    "Plan": "planning.plan",
    "Rates": "autotune.rates",
    "Selection": "sparse",
    "Settings": "tools.advise.settings",
    "advise": "tools.advise.advice",
    "attention": "attention",
    "checkpoint": "recompute.checkpoint",
    "choose": "autotune.select",
    "indexer_loss": "sparse",
    "layout": "",
    "linear_attention": "linear_attention.operation",
    "linear_cross_entropy": "linear_cross_entropy",
    "linear_kl": "linear_cross_entropy.divergence",
    "linear_logprobs": "linear_cross_entropy.logprobs",
    "masks": "",
    "measure_rates": "autotune.measure",
    "megatron": "",  # above this package: imported when asked for, by nothing in it
    "prepare": "planning.prepare",
    "prepare_linear": "linear_attention.plan",
    "rl": "megatron",  # above this package, as is `megatron`
    "select": "sparse",
    "shard": "layout.sharding",
    "short_convolution": "linear_attention.short_convolution",
    "simulate": "tools.advise.simulate",
    "sparse_attention": "sparse",
    "sparse_layer_spec": "megatron",
    "state_scan": "linear_attention.state_scan",
    "tiled": "recompute.tiles",
    "trees": "",
    "unshard": "layout.sharding",
}

__all__ = [
    "Advice",
    "BurstConfig",
    "Choice",
    "Cluster",
    "Gpu",
    "Groups",
    "HostMemory",
    "LinearPlan",
    "Model",
    "Plan",
    "Rates",
    "Selection",
    "Settings",
    "advise",
    "attention",
    "checkpoint",
    "choose",
    "indexer_loss",
    "layout",
    "linear_attention",
    "linear_cross_entropy",
    "linear_kl",
    "linear_logprobs",
    "masks",
    "measure_rates",
    "prepare",
    "prepare_linear",
    "select",
    "shard",
    "short_convolution",
    "simulate",
    "sparse_attention",
    "state_scan",
    "tiled",
    "trees",
    "unshard",
]


class _Package(ModuleType):
    """`mb.attention` and others are functions whose modules have the same names: what the import
    system binds for a submodule must not hide the function."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (isinstance(value, ModuleType) and _HOMES.get(name)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]
    module = importlib.import_module(f"{__name__}.{home or name}")
    found = getattr(module, name) if home else module
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

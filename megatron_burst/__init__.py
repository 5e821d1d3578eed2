# SPDX-License-Identifier: Apache-2.0
"""BurstAttention context parallelism for an unmodified Megatron.

Public names are imported at first use, so masks, layouts, schedules and forecasts work without
torch. Importing the package has no side effect. `__init__.pyi` has the same names for editors and
type checkers.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

# Public name -> module that defines it; empty if the name itself is a module.
# `registry.public_names` has the public names of plugins.
_HOMES = {
    "BurstConfig": "config",
    "Choice": "autotune.select",
    "Cluster": "autotune.clusters",
    "Gpu": "autotune.gpus",
    "Groups": "comm.groups",
    "LinearPlan": "linear_attention.plan",
    "Plan": "planning.plan",
    "Rates": "autotune.rates",
    "attention": "attention",
    "checkpoint": "recompute.checkpoint",
    "choose": "autotune.select",
    "joint_attention": "attention",
    "layout": "",
    "linear_attention": "linear_attention.operation",
    "linear_cross_entropy": "linear_cross_entropy",
    "masks": "",
    "measure_rates": "autotune.measure",
    "megatron": "",  # imports Megatron; no other sub-package imports it
    "prepare": "planning.prepare",
    "prepare_linear": "linear_attention.plan",
    "shard": "layout.sharding",
    "short_convolution": "linear_attention.short_convolution",
    "state_scan": "linear_attention.state_scan",
    "unshard": "layout.sharding",
}

__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


class _PackageModule(ModuleType):
    """Module type that keeps a public function when the module of the same name is imported.

    For example, `mb.attention` is defined in the module `megatron_burst.attention`. Importing this
    module must not replace the function.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (isinstance(value, ModuleType) and _HOMES.get(name)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _PackageModule


def _registry() -> Any:
    """Import and return `megatron_burst.registry`, which most public names do not need."""
    # `from . import registry` would call `__getattr__`.
    return importlib.import_module(f"{__name__}.registry")


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        home = _HOMES[name]
        module = importlib.import_module(f"{__name__}.{home or name}")
        public = getattr(module, name) if home else module
    else:
        registry = _registry()
        of_plugins = registry.public_names()
        if name not in of_plugins:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        public = registry.load(*of_plugins[name])
    globals()[name] = public
    return public


def __dir__() -> list[str]:
    return sorted([*__all__, *_registry().public_names(), "__version__"])

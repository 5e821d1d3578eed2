# SPDX-License-Identifier: Apache-2.0
"""megatron_burst: BurstAttention context parallelism for an unmodified Megatron.

Public names are imported when they are first used: what needs no torch (masks, layouts,
schedules, forecasts) works without it. Importing the package changes nothing. `__init__.pyi` has
the same names for editors and type checkers.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

# Public name -> its module; a name that is a module itself is imported as such. Those of plugins
# are in the registry.
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
    "layout": "",
    "linear_attention": "linear_attention.operation",
    "linear_cross_entropy": "linear_cross_entropy",
    "masks": "",
    "measure_rates": "autotune.measure",
    "megatron": "",  # above this package: imported when asked for, by nothing in it
    "prepare": "planning.prepare",
    "prepare_linear": "linear_attention.plan",
    "shard": "layout.sharding",
    "short_convolution": "linear_attention.short_convolution",
    "state_scan": "linear_attention.state_scan",
    "unshard": "layout.sharding",
}

__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


class _Package(ModuleType):
    """`mb.attention` and others are functions whose modules have the same names: what the import
    system binds for a submodule must not hide the function.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (isinstance(value, ModuleType) and _HOMES.get(name)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def _registry() -> Any:
    """The module `registry`, which a run without plugins does not import."""
    return importlib.import_module(f"{__name__}.registry")  # `from .` would call `__getattr__`


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        home = _HOMES[name]
        module = importlib.import_module(f"{__name__}.{home or name}")
        found = getattr(module, name) if home else module
    else:
        registry = _registry()
        of_plugins = registry.public_names()
        if name not in of_plugins:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = registry.load(*of_plugins[name])
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*__all__, *_registry().public_names(), "__version__"])

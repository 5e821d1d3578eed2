"""Layers of linear attention over context-parallel ranks: gated delta nets and Mamba mixers."""

from __future__ import annotations

import importlib
from types import ModuleType

from megatron_burst.megatron.checks.linear import OLDEST
from megatron_burst.megatron.patching.compatibility import core_version

_PATCHING = ("heads", "delta_net", "mamba")  # each with patch(patches)


def patching_modules() -> list[ModuleType]:
    """The modules that patch layers of this Megatron; none before 0.19. Imports Megatron."""
    names = _PATCHING if core_version() >= OLDEST else ()
    return [importlib.import_module(f"{__name__}.{name}") for name in names]

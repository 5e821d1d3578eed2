"""BurstAttention for Megatron: install once, and let flags or `configure` choose it.

In a script of Megatron-LM, whose command line then has our flags, first of all:

    import megatron_burst.megatron
    megatron_burst.megatron.install()

In a script of one's own on Megatron-Core:

    import megatron_burst as mb, megatron_burst.megatron as burst
    burst.install(layout="zigzag")                       # before the model is built
    burst.configure(transformer_config, mb.BurstConfig(algorithm="burst"))

Owns: the public names of the integration. `install` changes what Megatron-Core builds, and only
for configurations that went through `configure` and have more than one context-parallel rank.
Megatron-Core, which takes seconds to import, is imported when `install` or the class needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_burst.megatron import cpu
from megatron_burst.megatron.attention.plan_book import startup_line
from megatron_burst.megatron.install import configure, install, installed_layout, uninstall
from megatron_burst.megatron.lm_head import startup_line as lm_head_line
from megatron_burst.megatron.training import available as training_available

if TYPE_CHECKING:
    from megatron_burst.megatron.attention.core_attention import BurstCoreAttention

__all__ = [
    "BurstCoreAttention",
    "configure",
    "cpu",
    "install",
    "installed_layout",
    "lm_head_line",
    "startup_line",
    "training_available",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    if name != "BurstCoreAttention":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megatron_burst.megatron.attention.core_attention import BurstCoreAttention

    return BurstCoreAttention

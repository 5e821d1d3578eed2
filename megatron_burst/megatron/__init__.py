"""BurstAttention for Megatron: install it once, then choose it by flags or with `configure`.

In a script of Megatron-LM these are the first lines; they add flags to its command line:

    import megatron_burst.megatron
    megatron_burst.megatron.install()

In your own script on Megatron-Core:

    import megatron_burst as mb, megatron_burst.megatron as burst
    burst.install(layout="zigzag")                       # before the model is built
    burst.configure(transformer_config, mb.BurstConfig(algorithm="burst"))

`install` changes only models whose configuration went through `configure` and that have more than
one context-parallel rank. Importing this package does not import Megatron-Core, which takes
seconds; `install` does.

Folders: ``attention/`` core attention, process groups, plans; ``data/`` slicing of batches;
``lm_head/`` LM head and loss; ``training/`` Megatron-LM's training loop; ``checks/`` what is
refused; ``patching/`` replacing functions of Megatron and restoring them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from megatron_burst.megatron import cpu
from megatron_burst.megatron.attention.plan_book import startup_line
from megatron_burst.megatron.install import configure, install, installed_layout, uninstall
from megatron_burst.megatron.lm_head import startup_line as lm_head_line
from megatron_burst.megatron.training import available as training_available

if TYPE_CHECKING:
    from megatron_burst.megatron.attention.core_attention import BurstCoreAttention
    from megatron_burst.megatron.data.sequences import gather_sequence, shard_sequence

_LATE = {  # these import Megatron-Core
    "BurstCoreAttention": "attention.core_attention",
    "gather_sequence": "data.sequences",
    "shard_sequence": "data.sequences",
}

__all__ = [
    "BurstCoreAttention",
    "configure",
    "cpu",
    "gather_sequence",
    "install",
    "installed_layout",
    "lm_head_line",
    "shard_sequence",
    "startup_line",
    "training_available",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATE[name]}"), name)

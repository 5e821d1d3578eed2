# SPDX-License-Identifier: Apache-2.0
"""BurstAttention for Megatron: install it once, then select it by flags or with `configure`.

Put these lines first in a Megatron-LM script; they add our flags to its command line:

    import megatron_burst.megatron
    megatron_burst.megatron.install()

In your own script on Megatron-Core:

    import megatron_burst as mb, megatron_burst.megatron as burst
    burst.install(layout="zigzag")                       # before the model is built
    burst.configure(transformer_config, mb.BurstConfig(algorithm="burst"))

`install` affects only models whose configuration was passed to `configure`, by the script or by the
flags: their attention if `selection.uses_burst` is true, and their LM head with
`lm_head_loss`. Importing this package does not import Megatron-Core, because that import
needs seconds; `install` imports it.

The modules, from the lowest level: `patching` replaces functions of Megatron and restores them;
`checks/` refuses unsupported settings; `data/` cuts batches; `attention/` has core attention,
process groups and plans; `linear/` passes states of linear attention between ranks; `lm_head/`
has the fused LM head and loss; `packing/` repacks the documents of a step; `run_options`
completes the options of a run; `configuration` selects attention for a model; `training` connects
Megatron-LM's command line; `install` applies all patches. Plugins add offload to host memory, row
chunks and tiles (`longseq`), sparse attention (`sparse`) and images (`vision`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .attention.plan_book import startup_line
from .configuration import configure
from .data.cut import installed_layout
from .install import install, uninstall
from .lm_head import startup_line as lm_head_line
from .patching import training_available
from .users_mask import MaskBatch, MaskLayer

if TYPE_CHECKING:
    from .attention.core_attention import BurstCoreAttention
    from .data.slicing import gather_sequence, shard_sequence

_LAZY = {  # these import Megatron-Core
    "BurstCoreAttention": "attention.core_attention",
    "gather_sequence": "data.slicing",
    "shard_sequence": "data.slicing",
}

__all__ = [
    "BurstCoreAttention",
    "MaskBatch",
    "MaskLayer",
    "configure",
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
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)

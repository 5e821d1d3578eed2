"""`--spec megatron_burst.megatron.specs burst_layer_spec`: BurstAttention by Megatron's own flag.

Owns: the layer spec of a GPT model for scripts that know nothing of this package. Megatron-LM
calls functions named by `--spec` from 0.19 on; before, it takes only specs that are already made,
and those cannot look at the configuration. Must not know: attention.
"""

from __future__ import annotations

import importlib
from typing import Any

from megatron_burst.config import BurstConfig
from megatron_burst.megatron.checks import require_function
from megatron_burst.megatron.install import configure, install


def burst_layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    """The layers that Megatron would build by default, with our attention between ranks.

    config: Megatron-LM's ``GPTModelConfig``. Where our flags were added they count; otherwise it
    is `BurstConfig` as it stands, in Megatron's own layout. Raises ``ValueError`` for what cannot
    be honoured.
    """
    gpt = importlib.import_module("megatron.training.models.gpt")
    transformer = config.transformer
    if getattr(transformer, "burst", None) is None:
        install("zigzag")
        configure(transformer, BurstConfig(), seq_length=config.seq_length)
    return require_function(gpt, "default_layer_spec", ["config", "vp_stage"])(config, vp_stage)

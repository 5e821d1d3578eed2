"""`--spec megatron_burst.megatron.specs burst_layer_spec`: BurstAttention by Megatron's own flag.

Owns: the layer spec of a GPT model for scripts that know nothing of this package. Megatron-LM
calls functions named by `--spec` from 0.19 on; before, it takes only specs that are already made,
and those cannot look at the configuration. Must not know: attention.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

from megatron_burst import flags
from megatron_burst.config import BurstConfig
from megatron_burst.megatron.checks import require_function
from megatron_burst.megatron.install import configure, install


def burst_layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    """The layers that Megatron would build by default, with our attention between ranks.

    config: Megatron-LM's ``GPTModelConfig``. Where our flags were added they count, but for the
    algorithm "megatron"; otherwise it is `BurstConfig` as it stands, in Megatron's own layout.
    Raises ``ValueError`` for what cannot be honoured.
    """
    gpt = importlib.import_module("megatron.training.models.gpt")
    chosen = getattr(config.transformer, "burst", None)
    if chosen is None:
        chosen = BurstConfig()
        install(chosen.layout)
    if chosen.algorithm == flags.OFF:  # without --context-parallel-algo; this flag asks for it
        chosen = dataclasses.replace(chosen, algorithm=BurstConfig.algorithm)
    configure(config.transformer, chosen)
    return require_function(gpt, "default_layer_spec", ["config", "vp_stage"])(config, vp_stage)

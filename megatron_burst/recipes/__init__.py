# SPDX-License-Identifier: Apache-2.0
"""BurstAttention for recipes of Megatron-Bridge and of NeMo 2.

    from megatron_burst.recipes import apply_burst

    cfg = apply_burst(llama3_8b_128k_pretrain_config(), lm_head_loss="single_pass", store=0.5)

This package imports neither Megatron-Bridge nor NeMo until `apply_burst` gets one of their recipes.
"""

from __future__ import annotations

from .apply import apply_burst
from .layers import burst_layer_spec

__all__ = ["apply_burst", "burst_layer_spec"]

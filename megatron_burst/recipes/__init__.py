"""BurstAttention for recipes: Megatron-Bridge's, and those of NeMo 2.

    from megatron_burst.recipes import apply_burst

    cfg = apply_burst(llama3_8b_128k_pretrain_config(), lm_head_loss="single_pass", store=0.5)

Owns: the public names. Nothing of Bridge or NeMo is imported before a recipe of theirs is there.
"""

from __future__ import annotations

from megatron_burst.recipes.apply import apply_burst
from megatron_burst.recipes.layers import burst_layer_spec

__all__ = ["apply_burst", "burst_layer_spec"]

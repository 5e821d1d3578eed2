# SPDX-License-Identifier: Apache-2.0
"""BurstAttention in models of Megatron Lite: `set_attention_backend` swaps it into a built model.

Megatron Lite lets the attention of a built model be replaced by a module without parameters. Here
that is one that plans once per micro-batch, from the documents that the model hands to attention,
and takes the layout that Lite cuts packed batches by: zigzag within every document. Batches, rotary
embedding, checkpoints and optimizer stay Lite's. Nothing of Megatron is imported.
"""

from __future__ import annotations

from .swap import set_attention_backend

__all__ = ["set_attention_backend"]

# SPDX-License-Identifier: Apache-2.0
"""BurstAttention in models of Megatron Lite.

`swap.set_attention_backend` replaces the attention of a built model. Megatron Lite allows this for
a module without parameters. The module makes a plan once per micro-batch, from the documents that
the model passes to attention, in Lite's layout of packed batches: zigzag within every document.
Batches, rotary embedding, checkpoints and optimizer do not change. Nothing of Megatron is imported.
"""

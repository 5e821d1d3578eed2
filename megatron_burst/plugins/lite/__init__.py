# SPDX-License-Identifier: Apache-2.0
"""BurstAttention in models of Megatron Lite.

`swap.set_attention_backend` replaces the attention of a built model. Megatron Lite allows this for
a module without parameters. The module plans once per micro-batch, from the documents that the
model passes to attention, in the layout by which Lite cuts packed batches: zigzag within every
document. Batches, rotary embedding, checkpoints and optimizer stay Lite's. Nothing of Megatron is
imported.
"""

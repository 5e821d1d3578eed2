# SPDX-License-Identifier: Apache-2.0
"""BurstAttention in models of Megatron Lite.

`swap.set_attention_backend` replaces the core attention of a built model by a module without
parameters. The module makes one plan per micro-batch, from the document boundaries that the model
passes to attention. The layout is Lite's: each document is split in zigzag order. Batches, rotary
embedding and optimizer do not change. The plugin does not import Megatron.
"""

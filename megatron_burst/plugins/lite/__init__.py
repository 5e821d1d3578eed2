# SPDX-License-Identifier: Apache-2.0
"""BurstAttention in models of Megatron Lite.

`swap.set_attention_backend` replaces the core attention of a built model by a module without
parameters. The module makes one plan per micro-batch, from the documents that the model passes to
attention and for Lite's layout of packed batches: zigzag within every document. Batches, rotary
embedding, checkpoints and optimizer do not change. The plugin does not import Megatron.
"""

"""Megatron-LM's own training loop: flags, arguments, checkpoints, validation."""

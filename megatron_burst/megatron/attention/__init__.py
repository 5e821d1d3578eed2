"""Megatron's core attention: the module, its process groups and its plans."""

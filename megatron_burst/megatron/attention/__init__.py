"""The attention of a model: Megatron's call, its process groups, its plans."""

"""Replacing functions of Megatron at run time, and restoring them."""

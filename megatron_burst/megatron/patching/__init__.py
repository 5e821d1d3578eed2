"""Replacing functions of Megatron while the process runs, and putting them back."""

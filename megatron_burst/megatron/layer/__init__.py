"""Transformer layers of Megatron that run in chunks and tiles of rows."""

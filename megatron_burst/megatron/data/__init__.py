"""Batches, rotary embeddings and attention masks for the layout of a run."""

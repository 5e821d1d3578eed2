"""Batches, rotary embeddings and masks, cut for the layout of a run."""

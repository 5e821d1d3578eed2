"""Sequence-level selective checkpointing: what is kept, and the partial ring for the rest."""

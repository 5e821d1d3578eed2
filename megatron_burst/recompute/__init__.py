# SPDX-License-Identifier: Apache-2.0
"""Sequence-level selective checkpointing: what is kept, and the partial ring for the rest."""

# SPDX-License-Identifier: Apache-2.0
"""Sequence-level selective checkpointing: the attention store and the recomputation of its gaps."""

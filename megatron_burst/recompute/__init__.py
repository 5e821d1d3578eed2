# SPDX-License-Identifier: Apache-2.0
"""Sequence-level selective checkpointing: keep some attention outputs, recompute the others."""

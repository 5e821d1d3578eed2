# SPDX-License-Identifier: Apache-2.0
"""Batches, rotary embeddings and attention masks for the layout of a run."""

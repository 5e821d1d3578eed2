# SPDX-License-Identifier: Apache-2.0
"""Transformer layers of Megatron that run in chunks and tiles of rows."""

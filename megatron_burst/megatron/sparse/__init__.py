# SPDX-License-Identifier: Apache-2.0
"""Layers of Megatron whose attention is sparse."""

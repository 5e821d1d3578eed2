# SPDX-License-Identifier: Apache-2.0
"""Megatron layers that attend to selected keys: Megatron's DSA, and selection rules."""

# SPDX-License-Identifier: Apache-2.0
"""Megatron layers with sparse attention over selected keys: DSA, and layers with a rule."""

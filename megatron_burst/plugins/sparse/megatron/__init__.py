# SPDX-License-Identifier: Apache-2.0
"""Layers of Megatron that attend to selected keys, with the operations of this plugin."""

# SPDX-License-Identifier: Apache-2.0
"""Layers that attend to selected keys, with the operations of this plugin."""

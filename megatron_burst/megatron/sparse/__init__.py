# SPDX-License-Identifier: Apache-2.0
"""Layers that attend to selected keys, with the operations of `megatron_burst.sparse`."""

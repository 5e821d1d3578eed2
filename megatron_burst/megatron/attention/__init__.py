# SPDX-License-Identifier: Apache-2.0
"""Core attention for Megatron: the module, its process groups and its plans."""

# SPDX-License-Identifier: Apache-2.0
"""Megatron's core attention: the module, its process groups and its plans."""

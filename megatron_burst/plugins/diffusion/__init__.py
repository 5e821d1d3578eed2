# SPDX-License-Identifier: Apache-2.0
"""Diffusion models of Megatron-Bridge over context-parallel ranks: text, video and images."""

# SPDX-License-Identifier: Apache-2.0
"""Shapes of models, by name, from a Hugging Face config.json, or from Megatron arguments."""

# SPDX-License-Identifier: Apache-2.0
"""Vision-language models: `images` for your own scripts, `recipes` for Megatron-Bridge."""

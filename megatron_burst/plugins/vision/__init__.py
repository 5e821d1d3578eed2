# SPDX-License-Identifier: Apache-2.0
"""Vision-language models: `images` for scripts of your own, `recipes` for Megatron-Bridge."""

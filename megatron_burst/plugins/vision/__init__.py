# SPDX-License-Identifier: Apache-2.0
"""Plugin for vision-language models: `images` for scripts, `recipes` for Megatron-Bridge."""

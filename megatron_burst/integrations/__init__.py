# SPDX-License-Identifier: Apache-2.0
"""BurstAttention inside frameworks that have Megatron-Core as their engine, one room each."""

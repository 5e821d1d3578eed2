# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning and distillation on Megatron models.

`trees` merges trajectories that share prefixes. `logprobs` and `divergence` compute
log-probabilities, entropies and KL divergence from hidden states. `batch` and `step` run a Megatron
model on trees (`mb.rl`, in `api`). `verl` uses these functions in verl.
"""

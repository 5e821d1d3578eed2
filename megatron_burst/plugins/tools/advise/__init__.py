# SPDX-License-Identifier: Apache-2.0
"""Prediction of the time and memory of a training run on a cluster of GPUs.

`shapes` describes models, and `settings` the settings of a run. `account` predicts memory,
`forecast` predicts time, and `search` finds the fastest settings that fit into memory. Predictions
for models in `shapes.models` require neither torch nor Megatron.
"""

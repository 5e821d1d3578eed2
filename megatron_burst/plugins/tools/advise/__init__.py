# SPDX-License-Identifier: Apache-2.0
"""Time and memory of a run on a cluster, from plain numbers without torch and Megatron.

`shapes` describes models, `settings` the settings of a run. `account` computes memory, `forecast`
computes time, and `search` finds the fastest settings that fit.
"""

# SPDX-License-Identifier: Apache-2.0
"""What a run on a cluster needs and takes, from plain numbers: no torch, no Megatron.

shapes: models; clusters, settings: what they run on and how; account: memory; forecast: time;
search: the settings to take.
"""

# SPDX-License-Identifier: Apache-2.0
"""Predicts which settings are fastest: rates, a simulator of schedules, candidates, a selection.

Needs no torch, except `measure`, which times real links and kernels.
"""

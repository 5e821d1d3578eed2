# SPDX-License-Identifier: Apache-2.0
"""Prediction of the fastest settings: rates, a simulator of schedules, candidates and a selection.

Only `measure`, which times real links and kernels, needs torch.
"""

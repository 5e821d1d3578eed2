# SPDX-License-Identifier: Apache-2.0
"""Prediction of times, and selection of the fastest settings of an attention call.

`simulator` predicts the time of a schedule from the rates of links and devices. `candidates`
simulates the settings that can run, and `select` chooses one. Only `measure`, which times real
links and kernels, needs torch.
"""

# SPDX-License-Identifier: Apache-2.0
"""Tools around a training run: advice, memory estimates, pictures, traces, calibration."""

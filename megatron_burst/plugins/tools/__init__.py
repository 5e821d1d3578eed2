# SPDX-License-Identifier: Apache-2.0
"""What people ask before and after a run: advice, memory, pictures, traces, calibration."""

# SPDX-License-Identifier: Apache-2.0
"""Linear attention and state-space scans over context-parallel ranks."""

# SPDX-License-Identifier: Apache-2.0
"""Local attention kernels for one device."""

# SPDX-License-Identifier: Apache-2.0
"""Kernels: the local attention on one device. `base` has the protocol, `registry` the table."""

# SPDX-License-Identifier: Apache-2.0
"""Kernels: local attention of one block of queries to one block of keys, on one device."""

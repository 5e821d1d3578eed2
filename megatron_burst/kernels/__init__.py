# SPDX-License-Identifier: Apache-2.0
"""Kernels: operators for the attention of a shard of queries to a shard of keys on one device."""

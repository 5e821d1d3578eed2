# SPDX-License-Identifier: Apache-2.0
"""Kernels of linear attention: the local computation of one rank."""

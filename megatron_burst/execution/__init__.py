# SPDX-License-Identifier: Apache-2.0
"""Execution of a plan on one rank: ring passes, exchanges of heads, and the autograd function."""

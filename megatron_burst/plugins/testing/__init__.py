# SPDX-License-Identifier: Apache-2.0
"""Megatron on a CPU, and ranks in one process, for the quickstart and for tests."""

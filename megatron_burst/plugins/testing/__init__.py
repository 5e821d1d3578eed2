# SPDX-License-Identifier: Apache-2.0
"""Megatron on a CPU, and all ranks of a grid in one process, for the quickstart and for tests."""

# SPDX-License-Identifier: Apache-2.0
"""Megatron on a CPU: stand-ins for the quickstart and the tests. Training needs none."""

# SPDX-License-Identifier: Apache-2.0
"""Analytical memory of one rank over a training step, tensor by tensor."""

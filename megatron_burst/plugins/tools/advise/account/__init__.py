# SPDX-License-Identifier: Apache-2.0
"""Predicted memory of one rank during a training step, computed tensor by tensor."""

# SPDX-License-Identifier: Apache-2.0
"""Predicted time of attention, of a layer and of a step."""

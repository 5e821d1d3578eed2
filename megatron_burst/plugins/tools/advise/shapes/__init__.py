# SPDX-License-Identifier: Apache-2.0
"""Shapes of models: by name, from a configuration, from arguments."""

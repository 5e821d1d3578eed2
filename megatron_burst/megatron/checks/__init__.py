# SPDX-License-Identifier: Apache-2.0
"""Checks of a run's settings, and the error that reports unsupported settings."""

# SPDX-License-Identifier: Apache-2.0
"""The search for the settings of a run."""

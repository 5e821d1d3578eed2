# SPDX-License-Identifier: Apache-2.0
"""The search for the settings of a run: what is tried, what is passed over, what is taken."""

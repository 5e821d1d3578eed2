# SPDX-License-Identifier: Apache-2.0
"""Search for the fastest settings of a run that fit into memory."""

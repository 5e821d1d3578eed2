# SPDX-License-Identifier: Apache-2.0
"""Between ranks: process groups of a grid, transports, messages, and checks that ranks agree."""

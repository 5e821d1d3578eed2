# SPDX-License-Identifier: Apache-2.0
"""Settings that cannot be honoured: how they are found and how they are reported."""

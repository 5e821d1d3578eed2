# SPDX-License-Identifier: Apache-2.0
"""Host memory for tensors that backward needs; they are fetched one layer ahead."""

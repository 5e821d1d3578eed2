# SPDX-License-Identifier: Apache-2.0
"""Host memory for the tensors that backward needs; backward fetches them one layer ahead."""

# SPDX-License-Identifier: Apache-2.0
"""Host memory as a tier: what backward needs waits there and is fetched one layer ahead."""

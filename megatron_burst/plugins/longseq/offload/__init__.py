# SPDX-License-Identifier: Apache-2.0
"""`--burst-offload` in Megatron: what layers leave for backward waits in host memory."""

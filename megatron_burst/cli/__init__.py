# SPDX-License-Identifier: Apache-2.0
"""The command line `megatron-burst`: `main.main`, and one module or folder per sub-command."""

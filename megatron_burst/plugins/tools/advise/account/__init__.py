# SPDX-License-Identifier: Apache-2.0
"""The memory of a rank over one step, tensor by tensor."""

# SPDX-License-Identifier: Apache-2.0
"""The LM head with its loss, and the losses of multi-token prediction."""

from __future__ import annotations

from .. import patching

STARTUP = "lm_head_startup"  # under this name the set of patches keeps the line below


def startup_line() -> str | None:
    """The log line of the fused loss in the first forward of this process; None without one."""
    return patching.notes().get(STARTUP)

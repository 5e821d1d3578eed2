# SPDX-License-Identifier: Apache-2.0
"""The LM head with its loss, and the losses of multi-token prediction."""

from __future__ import annotations

from .. import patching


def startup_line() -> str | None:
    """Return the line that the fused loss logged at its first forward in this process.

    Returns:
        The line; None before the first forward, and if the fused loss is not used.
    """
    return patching.run_state().lm_head_startup

# SPDX-License-Identifier: Apache-2.0
"""The LM head with its loss, and the losses of multi-token prediction."""

from __future__ import annotations

from .. import patching


def startup_line() -> str | None:
    """Return the log line of the fused loss in the first forward of this process.

    Returns:
        The line; None before the first forward, or without the fused loss.
    """
    return patching.run_state().lm_head_startup

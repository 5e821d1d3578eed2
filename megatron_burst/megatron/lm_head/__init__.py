"""The LM head with its loss, and the losses of multi-token prediction."""

from __future__ import annotations

from megatron_burst.megatron.patching import registry

STARTUP = "lm_head_startup"  # the note under which an installation keeps the line below


def startup_line() -> str | None:
    """What the fused loss of this process's first forward was; None before, or without it."""
    patches = registry.installed("burst")
    return patches.notes.get(STARTUP) if patches else None

"""Megatron-LM's training loop: flags, arguments, checkpoints, validation."""

from __future__ import annotations

import importlib.util


def available() -> bool:
    """Whether Megatron-LM (`megatron.training`) can be imported."""
    return importlib.util.find_spec("megatron.training") is not None

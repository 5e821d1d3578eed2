"""Megatron-LM's own training loop: flags, arguments, checkpoints, validation."""

from __future__ import annotations

import importlib.util


def available() -> bool:
    """Is there a Megatron-LM (`megatron.training`) to import?"""
    return importlib.util.find_spec("megatron.training") is not None

# SPDX-License-Identifier: Apache-2.0
"""Patches of Megatron for sparse attention; `mb.megatron.install` calls `patch`."""

from __future__ import annotations

from ....megatron.patching import HYBRID_SINCE, PatchSet, core_version
from . import index_loss


def patch(patches: PatchSet) -> None:
    """Patch Megatron's schedules for indexer losses and, from version 0.19 on, its DSA layers.

    Args:
        patches: Set of patches that records what it replaces.
    """
    index_loss.patch(patches)
    if core_version() >= HYBRID_SINCE:
        from . import hooks  # imports layers that older versions do not have

        hooks.patch(patches)

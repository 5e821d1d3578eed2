# SPDX-License-Identifier: Apache-2.0
"""Patches of Megatron for sparse attention that `install` applies."""

from __future__ import annotations

from ....megatron.checks.splitting import OLDEST
from ....megatron.patching import PatchSet, core_version
from . import index_loss


def patch(patches: PatchSet) -> None:
    """Add the loss of indexers to steps, and from Megatron-Core 0.19 on our layers to models.

    Args:
        patches: Set of patches.
    """
    index_loss.patch(patches)
    if core_version() >= OLDEST:
        from . import hooks  # imports layers that older versions do not have

        hooks.patch(patches)

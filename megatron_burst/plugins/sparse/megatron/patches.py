# SPDX-License-Identifier: Apache-2.0
"""The plugin's patches of Megatron, which `install` applies (hook `patch_megatron`)."""

from __future__ import annotations

from ....megatron.checks.splitting import OLDEST
from ....megatron.patching import PatchSet, core_version
from . import index_loss


def patch(patches: PatchSet) -> None:
    """Apply the patches of indexer losses and, from Megatron-Core 0.19 on, of sparse attention.

    Args:
        patches: Set of patches.
    """
    index_loss.patch(patches)
    if core_version() >= OLDEST:
        from . import hooks  # imports layers that older versions do not have

        hooks.patch(patches)

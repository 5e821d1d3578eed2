# SPDX-License-Identifier: Apache-2.0
"""Patches that `install` applies to Megatron for very long sequences."""

from __future__ import annotations

from ...megatron.patching import PatchSet
from .layer import forward_attention, own_forward, tiles
from .offload import hooks


def patch(patches: PatchSet) -> None:
    """Patch layers to run in row chunks and tiles, and to move saved tensors to the host."""
    own_forward.patch(patches)
    forward_attention.patch(patches)
    tiles.patch(patches)
    tiles.patch_final_norm(patches)
    hooks.patch_layers(patches)
    hooks.patch_weights(patches)
    hooks.patch_steps(patches)

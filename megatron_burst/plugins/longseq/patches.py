# SPDX-License-Identifier: Apache-2.0
"""What `install` patches in Megatron for very long sequences."""

from __future__ import annotations

from ...megatron.patching import PatchSet
from .layer import forward_attention, own_forward, tiles
from .offload import hooks


def patch(patches: PatchSet) -> None:
    """Run the halves of layers in chunks and tiles of rows, and move what they save to the host."""
    own_forward.patch(patches)
    forward_attention.patch(patches)
    tiles.patch(patches)
    tiles.patch_final_norm(patches)
    hooks.patch_layers(patches)
    hooks.patch_weights(patches)
    hooks.patch_steps(patches)

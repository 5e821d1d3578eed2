# SPDX-License-Identifier: Apache-2.0
"""Entry of the plugin `longseq`."""

from ...registry import Plugin

PLUGIN = Plugin(
    public={"HostMemory": "host.mover:HostMemory", "tiled": "tiles:tiled"},
    hooks={
        "host_memory": "host.mover",
        "offload_tier": "offload.tier:tier_of",
        "patch_megatron": "patches:patch",
    },
)

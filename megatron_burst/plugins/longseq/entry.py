# SPDX-License-Identifier: Apache-2.0
"""Registration of the plugin `longseq`."""

from ...registry import Plugin

PLUGIN = Plugin(
    options="options:LongSequenceOptions",
    public={"HostMemory": "host.mover:HostMemory", "tiled": "tiles:tiled"},
    hooks={
        "configured": "offload.tier:configured",
        "host_memory": "host.mover",
        "offload_tier": "offload.tier:tier_of",
        "option_problems": "checks:option_problems",
        "patch_megatron": "patches:patch",
        "row_chunks": "options:row_chunks",
    },
)

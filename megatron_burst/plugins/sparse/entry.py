# SPDX-License-Identifier: Apache-2.0
"""Registration of the plugin `sparse`: options, public names and hooks."""

from ...registry import Plugin

PLUGIN = Plugin(
    options="options:SparseOptions",
    public={
        "Selection": "selection:Selection",
        "compress": "compress:compress",
        "indexer_loss": "loss:indexer_loss",
        "select": "indexer:select",
        "sparse_attention": "attention:sparse_attention",
        "sparse_layer_spec": "megatron.layers:sparse_layer_spec",
    },
    hooks={
        "configured": "megatron.checks:configured",
        "hybrid_keys": "megatron.hybrid_settings:hybrid_keys",
        "patch_megatron": "megatron.patches:patch",
        "sparse_problems": "megatron.checks:sparse_problems",
    },
)

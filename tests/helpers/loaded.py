"""Imports of a process that forks ranks: they take longer than the steps of a rank."""

import contextlib
import gc
import importlib

# Modules that every rank of a model of Megatron-Bridge imports.
BRIDGE = [
    "megatron.bridge.training.config",
    *(
        f"megatron_burst.{name}"
        for name in (
            "recipes", "megatron.attention.hooks", "megatron.data.loader",
            "megatron.lm_head.fused_loss", "megatron.lm_head.mtp", "megatron.packing.step",
            "megatron.training", "megatron.linear.delta_net", "megatron.linear.mamba",
            "plugins.diffusion.recipes", "plugins.longseq.layer.tiles", "plugins.longseq.patches",
            "plugins.sparse.megatron.hooks", "plugins.vision.recipes", "plugins.vision.images",
            "layout.balanced", "execution.ring", "kernels.rowwise_code",
        )
    ),
]  # fmt: skip


def load(names):
    """Import modules; some are absent in an older Megatron."""
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # what was imported stays: no rank looks through it for garbage

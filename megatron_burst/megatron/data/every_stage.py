"""Datasets with documents on every stage of a pipeline.

Where batches state the ends of documents, ``pretrain_gpt.py`` reads one on every stage and for
every chunk of an interleaved pipeline, since each attention layer needs them. With
``--dataloader-inter-document-masking`` (0.19, 0.20) it builds the dataset nevertheless only where
tokens or labels are used, and stages in the middle fail. Here such a dataset is built on all.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from megatron.core import parallel_state

from megatron_burst.megatron.patching import registry
from megatron_burst.megatron.patching.compatibility import require_parameters


def patch(patches: registry.PatchSet) -> None:
    """Add to a set of patches what builds datasets with documents on every stage."""
    # Late: only scripts of Megatron-LM need the datasets.
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )

    original = BlendedMegatronDatasetBuilder.__init__
    names = ["is_built_on_rank", "config"]
    require_parameters(original, names, "BlendedMegatronDatasetBuilder.__init__")
    patches.replace(BlendedMegatronDatasetBuilder, "__init__", _on_every_stage(original))


def _on_every_stage(original: Callable) -> Callable:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(*args: Any, **named: Any) -> None:
        bound = signature.bind(*args, **named)
        asked = bound.arguments["is_built_on_rank"]
        if getattr(bound.arguments["config"], "inter_document_masking", False):
            # Other tensor-parallel ranks get their batches from the first.
            bound.arguments["is_built_on_rank"] = lambda: (
                asked() or parallel_state.get_tensor_model_parallel_rank() == 0
            )
        original(*bound.args, **bound.kwargs)

    return __init__

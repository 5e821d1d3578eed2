# SPDX-License-Identifier: Apache-2.0
"""Cutting of Megatron-Bridge's packed batches over ranks, in the layout that attention expects.

Bridge's training step cuts a packed batch with a function that calls Transformer Engine, which
supports only zigzag and requires padded documents. This module replaces the function.
`megatron.data.packed` determines which positions a rank holds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from ..megatron import patching
from ..megatron.data.cut import cut_of_run, installed_layout
from ..megatron.patching import given_to

_NAME = "recipes, packed"
_STEP = "megatron.bridge.training.gpt_step"
_CUT = "_partition_packed_batch_for_cp"


def patch_bridge() -> None:
    """Replace Bridge's function that cuts packed batches, if Bridge's training step is loaded.

    Idempotent.

    Raises:
        RuntimeError: Bridge's function does not have the expected parameters.
    """
    step = sys.modules.get(_STEP)
    if step is None or patching.installed(_NAME) is not None:
        return
    with patching.patch_set(_NAME) as patches:
        patches.wrap(step, _CUT, ["batch"], _cutting)


def _cutting(original: Callable, *args: Any, **kwargs: Any) -> dict[str, Any]:
    # Imported here: these modules import Megatron-Core, which may be absent when a recipe is built.
    from ..megatron.data.entries import documents_of
    from ..megatron.data.slicing import context_group, take

    layout = installed_layout()
    if layout is None:  # no model of this process has BurstAttention
        return original(*args, **kwargs)
    batch = given_to(original, args, kwargs)["batch"]
    group = context_group()
    rows = [batch[name] for name in ("tokens", "labels") if batch.get(name) is not None]
    documents = documents_of(batch)
    if documents is None:
        raise ValueError(
            "packed batches of Megatron-Bridge must have cu_seqlens, cu_seqlens_q or "
            "packed_seq_params, with the boundaries of documents; the keys of this batch are "
            f"{', '.join(batch)}"
        )
    token_entries = {name: x for name, x in batch.items() if _spans(x, rows)}
    return batch | take(token_entries, documents, cut_of_run(layout), group.size(), group.rank())


def _spans(x: Any, rows: list[torch.Tensor]) -> bool:
    """Return True if an entry of a batch has one value per token."""
    return isinstance(x, torch.Tensor) and bool(rows) and x.shape == rows[0].shape

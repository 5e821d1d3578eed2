"""Batches and rotary embeddings for layouts that Megatron does not have.

Owns: the replacements of Megatron's two slicing functions. A run has one layout: Megatron caches
rotary embeddings, and batches are cut before any model sees them. Must not know: attention.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

import megatron_burst as mb
from megatron_burst.megatron.checks import require_parameters

_NOT_SEQUENCES = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size")


def batch_slicer(original: Callable, layout: str) -> Callable:
    """A replacement for ``megatron.core.utils.get_batch_on_this_cp_rank`` (0.16 to 0.20)."""
    require_parameters(original, ["batch", "cp_group"], "utils.get_batch_on_this_cp_rank")
    signature = inspect.signature(original)

    @functools.wraps(original)
    def get_batch_on_this_cp_rank(*args: Any, **kwargs: Any) -> dict[str, Any]:
        bound = signature.bind(*args, **kwargs)
        batch, group = bound.arguments["batch"], bound.arguments.get("cp_group")
        if bound.arguments.get("is_hybrid_cp") or batch.get("cu_seqlens") is not None:
            raise ValueError(
                f"packed sequences and hybrid context parallelism need --burst-layout zigzag, "
                f"this run has {layout}"
            )
        for key, value in batch.items():
            if value is not None and key not in _NOT_SEQUENCES:
                # An attention mask is [batch, 1, queries, keys]: ranks share the queries.
                batch[key] = _shard(value, layout, group, 2 if key == "attention_mask" else 1)
        return batch

    return get_batch_on_this_cp_rank


def rope_slicer(original: Callable, layout: str) -> Callable:
    """A replacement for ``rope_utils.get_pos_emb_on_this_cp_rank``."""
    require_parameters(
        original, ["pos_emb", "seq_dim", "cp_group"], "rope_utils.get_pos_emb_on_this_cp_rank"
    )

    @functools.wraps(original)
    def get_pos_emb_on_this_cp_rank(pos_emb: torch.Tensor, seq_dim: int, cp_group: Any = None):
        if cp_group is None:
            raise ValueError("cp_group is None: positions per rank need the group of the rank")
        return _shard(pos_emb, layout, cp_group, seq_dim)

    return get_pos_emb_on_this_cp_rank


def _shard(x: torch.Tensor, layout: str, group: Any, dim: int) -> torch.Tensor:
    if group is None:
        from megatron.core import parallel_state

        group = parallel_state.get_context_parallel_group()
    size = group.size()
    if size == 1:
        return x
    if x.size(dim) % (2 * size):
        raise ValueError(
            f"--seq-length {x.size(dim)} is not divisible by 2 x --context-parallel-size "
            f"({2 * size}); pad the sequences or change one of the two"
        )
    return mb.shard(x, mb.layout.make(layout, cp_size=size), group.rank(), dim=dim)

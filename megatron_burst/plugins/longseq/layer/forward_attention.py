# SPDX-License-Identifier: Apache-2.0
"""Patch of `TransformerLayer._forward_attention`, which runs attention in row chunks.

A row chunk is a part of a rank's rows; row chunks are computed one after the other. This module
also decides how many row chunks "auto" selects. The choice considers only memory, because the only
other effect of more chunks is that keys are sent more often. The tensors of one chunk get at most a
quarter of the bytes of the tensors for all rows. More chunks could reduce the sum of both by a
fifth at most. A chunk has at least `MIN_CHUNK_ROWS` rows, because fewer rows give short matrix
products and short messages.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer

from ....megatron import patching
from ....megatron.attention.core_attention import AttentionCall, BurstCoreAttention
from ....megatron.attention.plan_book import RowChunkSizes
from ....megatron.patching import given_to
from ....option_table import Auto
from ....planning.plan import Plan
from ....recompute.checkpoint import current_store
from ....recompute.tile_counts import MIN_CHUNK_ROWS
from ....units import byte_size
from ..offload.tier import tier_of
from .attention_chunks import RowChunkedHalf
from .attention_rows import Angles, AttentionHalf, RowChunkIndex

FLAG = "--burst-sequence-chunks"
# Arguments of inference and cross attention, which must be None.
_UNSUPPORTED = (
    "context", "rotary_pos_cos", "rotary_pos_sin", "rotary_pos_cos_sin", "inference_context",
    "inference_params", "sequence_len_offset",
)  # fmt: skip


def patch(patches: patching.PatchSet) -> None:
    """Add the patch that runs the attention half of layers (norm to residual) in row chunks."""
    names = ["hidden_states", "attention_mask", "rotary_pos_emb", "attention_bias",
             "packed_seq_params"]  # fmt: skip
    wrapper = functools.partial(_in_chunks, patches)
    patches.wrap(TransformerLayer, "_forward_attention", names, wrapper)


def _in_chunks(
    patches: patching.PatchSet, original: Callable, self: Any, *args: Any, **kwargs: Any
) -> tuple[Any, Any]:
    core = getattr(self.self_attention, "core_attention", None)
    if not isinstance(core, BurstCoreAttention) or core.sequence_chunks == 1:
        return original(self, *args, **kwargs)
    arguments = given_to(original, (self, *args), kwargs)
    hidden, angles = arguments.pop("hidden_states"), arguments.pop("rotary_pos_emb", None)
    params = arguments.pop("packed_seq_params", None)
    masks = {name: arguments.pop(name, None) for name in ("attention_mask", "attention_bias")}
    _check(self, arguments)
    named = {"attention_mask": None}  # `_check` allows only None for the other arguments
    blocks = self.self_attention.pg_collection.tp.size() if self.config.sequence_parallel else 1
    rows = len(hidden) * blocks
    table = Angles(self.self_attention, angles, hidden, params, rows)
    half = AttentionHalf(self, original, named, table)
    call = _call(half, hidden, masks, params, patches)
    if call is None:
        return original(self, *args, **kwargs)
    stored, tier = call.plan.store_entry(current_store(), call.label), tier_of(patches)
    host = None if tier is None or call.plan.host_refusal is not None else tier.keys()
    if tier is not None:
        patching.log_once(patches.run, keys_line(call.plan, self.config.burst.offload))
    return RowChunkedHalf(half, call, stored, half.parameters(), host).apply(hidden), None


def _call(
    half: AttentionHalf,
    hidden: torch.Tensor,
    masks: dict[str, Any],
    params: Any,
    patches: patching.PatchSet,
) -> AttentionCall | None:
    """Return the attention call for all rows; None if "auto" selects one chunk.

    To get the shapes of queries, keys and values, the layer computes them for one row.
    """
    blocks, device = half.blocks, hidden.device
    first_row = RowChunkIndex(torch.arange(blocks, device=device), torch.arange(1, device=device))
    with torch.no_grad():
        inputs = half.core_inputs(hidden[:1], first_row)
    rows = len(hidden) * blocks
    # Tensors with the shapes of all rows, without memory for them.
    q, k, v = (x.new_empty(()).expand(rows, *x.shape[1:]) for x in inputs[:3])
    count = half.core.sequence_chunks
    if count == "auto":
        count, line = chunk_count(q, k, v, width=hidden.shape[-1], blocks=blocks)
        patching.log_once(patches.run, f"{FLAG} auto: {line}")
        if count == 1:
            return None
    return half.core.prepare_call(
        q, k, v, inputs.mask_type, masks, params, RowChunkSizes(count, blocks)
    )


def keys_line(plan: Plan, offload: float | Auto) -> str:
    """Return the log line about the memory that keeps keys of other ranks between row chunks."""
    if plan.host_refusal is None and plan.groups.topology.ring_size > 1:
        condition = ' unless "auto" selects 0' if offload == "auto" else ""
        location = f"in host memory between row chunks{condition}"
    else:
        location = "not in host memory between row chunks"
    return f"--burst-offload {offload}: keys of other ranks are {location}"


def _check(layer: Any, arguments: dict[str, Any]) -> None:
    """Raise ValueError if the layer, or this call of it, cannot run in row chunks."""
    for name in _UNSUPPORTED:
        if arguments.get(name) is not None:
            raise ValueError(
                f"{FLAG} does not support the layer argument {name}; pass {name}=None or remove "
                "the flag"
            )
    if not isinstance(layer.cross_attention, IdentityOp):
        raise ValueError(f"{FLAG} does not support layers with cross attention; remove the flag")
    if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
        raise ValueError(
            f"{FLAG}: backward recomputes row chunks outside torch.autocast; remove the flag or "
            "torch.autocast"
        )
    if not layer.training:
        return
    if layer.hidden_dropout:
        raise ValueError(
            f"{FLAG}: hidden dropout is {layer.hidden_dropout}, and recomputed rows would draw "
            "different random numbers; add --hidden-dropout 0"
        )
    for name, module in layer.self_attention.named_modules():
        if isinstance(module, torch.nn.Dropout) and module.p:
            raise ValueError(
                f"{FLAG}: dropout of self_attention.{name} is {module.p}, and recomputed rows "
                "would draw different random numbers; set it to 0"
            )


def chunk_count(q: Any, k: Any, v: Any, *, width: int, blocks: int) -> tuple[int, str]:
    """Return the number of row chunks, which is the same on all ranks, and the log line for it.

    Args:
        q: Queries [s rows, b batch, h heads, d width] of the shard; only shape and dtype are used.
        k: Keys [s, b, g key heads, d]; only the shape is used.
        v: Values [s, b, g, w value width]; only the shape is used.
        width: Width of the hidden states.
        blocks: Number of tensor-parallel ranks that share the rows.
    """
    chunk, full = bytes_per_row(q, k, v, width, blocks)
    rows, batch = q.shape[:2]
    count = max(1, min(math.ceil(4 * chunk / full), rows // MIN_CHUNK_ROWS))
    return count, (
        f"{count} chunks of {math.ceil(rows / count):,} rows in attention halves; a chunk needs "
        f"{byte_size(math.ceil(chunk * rows * batch / count))}, and tensors of all {rows:,} rows "
        f"need {byte_size(full * rows * batch)}"
    )


def bytes_per_row(q: Any, k: Any, v: Any, width: int, blocks: int) -> tuple[int, int]:
    """Return two sums of bytes per row: over tensors of one chunk, and over tensors of all rows.

    Arguments are the same as in `chunk_count`. Both sums are for backward, which needs the most
    memory. Tensors of one chunk are:

    - the layer's input, norm output, attention output and their gradients, for the rank's share of
      the rows,
    - the gathered input and its gradient,
    - q, k and v before and after rope, and their gradients, for q also in fp32,
    - the output of core attention and its gradient.

    Tensors of all rows are the hidden states, the gradients of input and output (for the rank's
    share of the rows), k and v and their fp32 gradients, and the output of core attention.
    """
    queries, keys, values = (x[0, 0].numel() for x in (q, k, v))
    out = q.shape[2] * v.shape[3]
    share, kv = -(-width // blocks), keys + values
    chunk = q.itemsize * (6 * share + 2 * width + 3 * (queries + kv) + 2 * out) + 4 * queries
    full = q.itemsize * (3 * share + kv + out) + 4 * kv
    return chunk, full

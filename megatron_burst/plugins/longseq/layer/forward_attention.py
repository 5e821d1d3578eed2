# SPDX-License-Identifier: Apache-2.0
"""The function in which Megatron's transformer layers attend, replaced: it runs in chunks of rows.

Decides how many chunks "auto" takes, by memory alone, because more chunks only send keys round more
often. The working set of one chunk is made at most a quarter of what is as long as the rows,
whatever the number of chunks: infinitely many would save a fifth more. But chunks of fewer than
`MIN_CHUNK_ROWS` rows, which leave short matrix products and short messages, are not made.
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
from ....megatron.attention.plan_book import RowChunking
from ....megatron.patching import given_to, log
from ....option_table import Auto
from ....planning.plan import Plan
from ....recompute.checkpoint import current_store
from ....recompute.tile_counts import MIN_CHUNK_ROWS
from ....units import byte_size
from ..offload.tier import tier_of
from .attention_chunks import ChunkedHalf
from .attention_rows import Angles, AttentionHalf, ChunkRows

FLAG = "--burst-sequence-chunks"
# Of inference and of cross attention; other callers leave them None.
_NONE = (
    "context", "rotary_pos_cos", "rotary_pos_sin", "rotary_pos_cos_sin", "inference_context",
    "inference_params", "sequence_len_offset",
)  # fmt: skip


def patch(patches: patching.PatchSet) -> None:
    """Add to a set of patches what runs the attention half of layers in chunks of rows."""
    names = ["hidden_states", "attention_mask", "rotary_pos_emb", "attention_bias",
             "packed_seq_params"]  # fmt: skip
    around = functools.partial(_in_chunks, patches)
    patches.wrap(TransformerLayer, "_forward_attention", names, around)


def _in_chunks(
    patches: patching.PatchSet, original: Callable, self: Any, *args: Any, **kwargs: Any
) -> tuple[Any, Any]:
    core = getattr(self.self_attention, "core_attention", None)
    if not isinstance(core, BurstCoreAttention) or core.sequence_chunks == 1:
        return original(self, *args, **kwargs)
    given = given_to(original, (self, *args), kwargs)
    hidden, angles = given.pop("hidden_states"), given.pop("rotary_pos_emb", None)
    params = given.pop("packed_seq_params", None)
    masks = {name: given.pop(name, None) for name in ("attention_mask", "attention_bias")}
    _check(self, given)
    named = {"attention_mask": None}  # what else there is, is None
    blocks = self.self_attention.pg_collection.tp.size() if self.config.sequence_parallel else 1
    rows = len(hidden) * blocks
    table = Angles(self.self_attention, angles, hidden, params, rows)
    half = AttentionHalf(self, original, named, table)
    call = _call(half, hidden, masks, params, patches)
    if call is None:
        return original(self, *args, **kwargs)
    kept, tier = call.plan.store_entry(current_store(), call.label), tier_of(patches)
    host = None if tier is None or call.plan.host_refusal is not None else tier.keys()
    if tier is not None:
        _log_once(patches, keys_line(call.plan, self.config.burst.offload))
    return ChunkedHalf(half, call, kept, half.parameters(), host).apply(hidden), None


def _call(
    half: AttentionHalf,
    hidden: torch.Tensor,
    masks: dict[str, Any],
    params: Any,
    patches: patching.PatchSet,
) -> AttentionCall | None:
    """What `mb.attention` would take for all rows; None where "auto" takes one chunk.

    Shapes are those of one row, which goes as far as its query, key and value.
    """
    blocks, device = half.blocks, hidden.device
    one = ChunkRows(torch.arange(blocks, device=device), torch.arange(1, device=device))
    with torch.no_grad():
        reached = half.called(hidden[:1], one)
    rows = len(hidden) * blocks
    # Of the shapes of all rows, without their memory.
    q, k, v = (x.new_empty(()).expand(rows, *x.shape[1:]) for x in reached[:3])
    count = half.core.sequence_chunks
    if count == "auto":
        count, line = chunk_count(q, k, v, width=hidden.shape[-1], blocks=blocks)
        _log_once(patches, f"{FLAG} auto: {line}")
        if count == 1:
            return None
    return half.core.call(q, k, v, reached.mask_type, masks, params, RowChunking(count, blocks))


def keys_line(plan: Plan, offload: float | Auto) -> str:
    """The log line that says whether keys of other ranks are in host memory between row chunks."""
    if plan.host_refusal is None and plan.groups.topology.ring_size > 1:
        when = " unless it takes 0" if offload == "auto" else ""
        where = f"in host memory between row chunks{when}"
    else:
        where = "not in host memory between row chunks"
    return f"--burst-offload {offload}: keys of other ranks are {where}"


def _log_once(patches: patching.PatchSet, line: str) -> None:
    logged = patches.notes.setdefault("lines of row chunks", set())
    if line not in logged:
        logged.add(line)
        log(line)


def _check(layer: Any, given: dict[str, Any]) -> None:
    """Raise ValueError for a call of an attention half that chunks of rows would change."""
    for name in _NONE:
        if given.get(name) is not None:
            raise ValueError(f"{FLAG}: {name} is not supported; leave it out, or the flag")
    if not isinstance(layer.cross_attention, IdentityOp):
        raise ValueError(f"{FLAG}: cross attention is not cut into rows; leave the flag out")
    if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
        raise ValueError(
            f"{FLAG}: chunks run again in backward, outside torch.autocast; leave one out"
        )
    if not layer.training:
        return
    if layer.hidden_dropout:
        raise ValueError(
            f"{FLAG}: hidden dropout is {layer.hidden_dropout}, and rows that run again would "
            "draw other numbers; add --hidden-dropout 0"
        )
    for name, module in layer.self_attention.named_modules():
        if isinstance(module, torch.nn.Dropout) and module.p:
            raise ValueError(
                f"{FLAG}: self_attention.{name} drops out {module.p}, and rows that run again "
                "would draw other numbers; set it to 0"
            )


def chunk_count(q: Any, k: Any, v: Any, *, width: int, blocks: int) -> tuple[int, str]:
    """The number of chunks, the same on all ranks, and why it is that.

    q [s, b, h, d], k [s, b, g, d], v [s, b, g, w]: of all rows of the shard, only shapes and
    dtypes count. width: of hidden states; blocks: ranks that share their rows.
    """
    chunk, whole = bytes_per_row(q, k, v, width, blocks)
    rows, batch = q.shape[:2]
    count = max(1, min(math.ceil(4 * chunk / whole), rows // MIN_CHUNK_ROWS))
    held = byte_size(whole * rows * batch)
    return count, (
        f"{count} of {math.ceil(rows / count):,} rows for attention halves of layers, each "
        f"{byte_size(math.ceil(chunk * rows * batch / count))} beside {held} for all {rows:,} rows"
    )


def bytes_per_row(q: Any, k: Any, v: Any, width: int, blocks: int) -> tuple[int, int]:
    """(of a chunk, of what is as long as all rows) in backward, where both are largest.

    A chunk: input, norm, output, gradients of these (a rank's share of the rows), the gathered
    input and its gradient, q, k, v before and after rope and their gradients, of q also fp32, out
    and its gradient. All rows: hidden states and the gradients of input and output, k and v and
    their fp32 gradients, out.
    """
    queries, keys, values = (x[0, 0].numel() for x in (q, k, v))
    out = q.shape[2] * v.shape[3]
    share, kv = -(-width // blocks), keys + values
    chunk = q.itemsize * (6 * share + 2 * width + 3 * (queries + kv) + 2 * out) + 4 * queries
    whole = q.itemsize * (3 * share + kv + out) + 4 * kv
    return chunk, whole

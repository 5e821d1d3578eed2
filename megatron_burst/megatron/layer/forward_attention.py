"""The replacement of the function in which Megatron's transformer layers attend."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_burst.megatron.attention.call import Call
from megatron_burst.megatron.attention.core_attention import BurstCoreAttention
from megatron_burst.megatron.attention.plan_book import Rows
from megatron_burst.megatron.layer.attention_chunks import Chunks
from megatron_burst.megatron.layer.attention_rows import Angles, AttentionHalf, ChunkRows
from megatron_burst.megatron.layer.chunk_count import chunk_count
from megatron_burst.megatron.log import log
from megatron_burst.megatron.patching import registry
from megatron_burst.megatron.patching.compatibility import require_parameters
from megatron_burst.recompute.checkpoint import current

FLAG = "--burst-sequence-chunks"
# Of inference and of cross attention; other callers leave them None.
_NONE = (
    "context", "rotary_pos_cos", "rotary_pos_sin", "rotary_pos_cos_sin", "inference_context",
    "inference_params", "sequence_len_offset",
)  # fmt: skip


def patch(patches: registry.PatchSet) -> None:
    """Add to a set of patches what runs the attention half of layers in chunks of rows."""
    original = TransformerLayer._forward_attention
    names = ["hidden_states", "attention_mask", "rotary_pos_emb", "attention_bias",
             "packed_seq_params"]  # fmt: skip
    require_parameters(original, names, "TransformerLayer._forward_attention")
    patches.replace(TransformerLayer, "_forward_attention", _in_chunks(original, patches))


def _in_chunks(original: Callable, patches: registry.PatchSet) -> Callable:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def _forward_attention(self: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        core = getattr(self.self_attention, "core_attention", None)
        if not isinstance(core, BurstCoreAttention) or core.sequence_chunks == 1:
            return original(self, *args, **kwargs)
        given = dict(signature.bind(self, *args, **kwargs).arguments)
        hidden, angles = given.pop("hidden_states"), given.pop("rotary_pos_emb", None)
        params = given.pop("packed_seq_params", None)
        asked = {name: given.pop(name, None) for name in ("attention_mask", "attention_bias")}
        _check(self, given)
        named = {"attention_mask": None}  # what else there is, is None
        blocks = self.self_attention.pg_collection.tp.size() if self.config.sequence_parallel else 1
        rows = len(hidden) * blocks
        table = Angles(self.self_attention, angles, hidden, params, rows)
        half = AttentionHalf(self, original, named, table)
        call = _call(half, hidden, asked, params, patches)
        if call is None:
            return original(self, *args, **kwargs)
        kept = call["plan"].keeps(current())
        return Chunks(half, call, kept, half.parameters()).apply(hidden), None

    return _forward_attention


def _call(
    half: AttentionHalf,
    hidden: torch.Tensor,
    asked: dict[str, Any],
    params: Any,
    patches: registry.PatchSet,
) -> Call | None:
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
        said = patches.notes.setdefault("chunks of rows", set())
        if line not in said:
            said.add(line)
            log(f"{FLAG} auto: {line}")
        if count == 1:
            return None
    return half.core.call(q, k, v, reached.mask_type, asked, params, Rows(count, blocks))


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

# SPDX-License-Identifier: Apache-2.0
"""Attention half of a transformer layer (input norm to residual), run for a subset of the rows.

All parts except core attention treat rows independently: input norm, projections, rotary embedding,
output gate, bias and residual. So Megatron's own code runs with the hidden states and rotary angles
of some rows, while `forward` of core attention is replaced. Rows of packed batches run as rows of
one sequence, with the rotary angles of their positions within documents.

Shape letters: s rows of this rank's shard, t tensor-parallel ranks that share these rows (sequence
parallelism; else 1), b batch, r rows of a chunk on this rank, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from megatron.core import utils
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention

from ....megatron.attention.core_attention import BurstCoreAttention
from ....megatron.data.cut import group_of
from ....megatron.data.packed import packs
from ....megatron.data.rope import ALL, TableRows, is_blank, tables
from ....megatron.patching import instead
from ....planning.plan import Plan

# Core attention of one row chunk: q, k, v [t r, b, heads, width] -> [t r, b, heads, width].
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class AttentionInputs(NamedTuple):
    """Arguments of core attention: q, k, v [t r, b, heads, width] and Megatron's mask type."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask_type: Any


class _CoreAttentionReached(Exception):
    """Signal that the layer called core attention. `args[0]` is an `AttentionInputs`."""


@dataclass(frozen=True)
class RowChunkIndex:
    """Row indices of one row chunk, int64 tensors on the device.

    Attributes:
        shard: [t r], indices of the chunk's queries and keys in the shard.
        local: [r], indices of the chunk's hidden states in this rank's hidden states.
    """

    shard: torch.Tensor
    local: torch.Tensor


@dataclass(frozen=True)
class AttentionHalf:
    """Attention half of one layer (input norm to residual), for one micro-batch.

    Attributes:
        layer: Megatron's `TransformerLayer`.
        original: `TransformerLayer._forward_attention`.
        named: Arguments of `original` by name, without hidden states and rotary angles.
        angles: Rotary angles of the rows of the shard.
    """

    layer: Any
    original: Callable[..., Any]
    named: dict[str, Any]
    angles: Angles

    @property
    def core(self) -> BurstCoreAttention:
        return self.layer.self_attention.core_attention

    @property
    def blocks(self) -> int:
        """Number of tensor-parallel ranks that share the rows of the shard."""
        attention = self.layer.self_attention
        split = self.layer.config.sequence_parallel
        return attention.pg_collection.tp.size() if split else 1

    def rows(self, plan: Plan) -> list[RowChunkIndex]:
        """Return the row indices of each row chunk in this rank's part of the plan."""
        (rows, *_), _, device = plan.signature[0]
        local_rows = rows // self.blocks
        rank = self.layer.self_attention.pg_collection.tp.rank() if self.blocks > 1 else 0
        chunks = []
        for chunk in plan.rank_plan.chunks:
            shard = torch.arange(rows, device=device) if chunk.rows is None else chunk.rows
            # Rows ascend, and each block has the same number of them.
            block = shard.chunk(self.blocks)[rank] if len(shard) else shard
            chunks.append(RowChunkIndex(shard, block - rank * local_rows))
        return chunks

    def parameters(self) -> list[torch.Tensor]:
        """Return the attention half's parameters that need gradients, without the sink."""
        mlp_half = [self.layer.pre_mlp_layernorm, self.layer.mlp]
        excluded = {id(p) for module in mlp_half for p in module.parameters()}
        excluded.add(id(self.core.softmax_offset))
        return [p for p in self.layer.parameters() if p.requires_grad and id(p) not in excluded]

    def run(self, hidden: torch.Tensor, rows: RowChunkIndex, attend: Attend) -> torch.Tensor:
        """Run the attention half for one row chunk.

        Args:
            hidden: Hidden states [r, b, H] of the chunk.
            rows: Rows of the chunk.
            attend: Function of (q, k, v) that replaces core attention.

        Returns:
            Output of the attention half [r, b, H].
        """

        def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> Any:
            return attend(q, k, v).flatten(2)

        with instead(self.core, "forward", forward), self.angles.only(rows) as angles:
            return self.original(self.layer, hidden, rotary_pos_emb=angles, **self.named)[0]

    def core_inputs(self, hidden: torch.Tensor, rows: RowChunkIndex) -> AttentionInputs:
        """Run a row chunk up to core attention, and return the arguments of core attention.

        Args:
            hidden: Hidden states [r, b, H] of the chunk.
            rows: Rows of the chunk.
        """

        def stop(
            q: Any, k: Any, v: Any, _: Any = None, attn_mask_type: Any = None, **__: Any
        ) -> torch.Tensor:
            raise _CoreAttentionReached(AttentionInputs(q, k, v, attn_mask_type))

        ranges = len(utils._nvtx_range_messages)
        try:
            with instead(self.core, "forward", stop), self.angles.only(rows) as angles:
                self.original(self.layer, hidden, rotary_pos_emb=angles, **self.named)
        except _CoreAttentionReached as stopped:
            inputs: AttentionInputs = stopped.args[0]
        else:
            name, number = type(self.layer).__name__, self.layer.layer_number
            raise RuntimeError(
                f"layer {number} ({name}): its attention did not call core_attention, which "
                "--burst-sequence-chunks requires; remove --burst-sequence-chunks"
            )
        while len(utils._nvtx_range_messages) > ranges:  # the exception skipped these calls
            utils.nvtx_range_pop()
        return inputs


class Angles:
    """Rotary angles of a shard's rows: one tensor, or a pair of tensors (for queries, for keys).

    Latent attention computes its own angles, for as many rows as its hidden states have. This class
    computes these angles once, for all rows. Inside `only`, an object that returns the angles of
    some rows replaces the rotary module of the attention.

    Args:
        attention: The layer's self attention.
        angles: `rotary_pos_emb`, as passed to the layer.
        hidden: Hidden states [s / t, b, H].
        params: A `PackedSeqParams` or None.
        rows: Number of rows of the shard.
    """

    def __init__(self, attention: Any, angles: Any, hidden: torch.Tensor, params: Any, rows: int):
        self._owner, self._scale = None, []
        # Megatron-Bridge stacks the angles of layers with and without a window.
        self._stacked = isinstance(angles, torch.Tensor) and angles.dim() == 5
        tables = tuple(angles) if self._stacked or isinstance(angles, tuple) else (angles,)
        if isinstance(attention, MultiLatentAttention):
            table, *self._scale = _latent_angles(attention, hidden, params)
            self._owner, tables = attention, (table,)
        self._tables = [
            t if t is None else _row_selector(t, attention, params, rows) for t in tables
        ]

    @contextmanager
    def only(self, rows: RowChunkIndex) -> Iterator[Any]:
        """Return a context that yields the argument `rotary_pos_emb` for some rows.

        For latent attention the argument is None: inside the context, the layer's own rotary module
        is replaced and returns the angles of these rows.

        Args:
            rows: Indices of the rows.
        """
        taken = [None if t is None else t(rows.shard) for t in self._tables]
        if self._stacked:
            yield torch.stack([t for t in taken if t is not None])
            return
        if self._owner is None:
            yield tuple(taken) if len(taken) > 1 else taken[0]
            return
        # Python looks up the instance attribute before the submodule of this name.
        vars(self._owner)["rotary_pos_emb"] = _FixedAngles([*taken, *self._scale])
        try:
            yield None
        finally:
            del vars(self._owner)["rotary_pos_emb"]


def _row_selector(
    table: torch.Tensor, attention: Any, params: Any, rows: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that maps indices of a shard's rows to the rotary angles of these rows.

    Args:
        table: Angles that Megatron passes to the layer.
        attention: Self attention of the layer.
        params: A `PackedSeqParams`, or None.
        rows: Number of rows of the shard.
    """
    if params is None:
        return lambda selected: table.index_select(0, selected)
    group = group_of(params, attention.pg_collection.cp)
    ends = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
    cut, size = attention.core_attention.cut, group.size()
    if is_blank(table):
        shard = ALL if size == 1 else TableRows(cut.name, size, group.rank())
        # Look the table up at each use: only the tables of few packs are kept at a time.
        return lambda selected: tables().of_pack(table, rows, ends, shard).index_select(0, selected)
    index = packs().of(rows * size, ends).index(cut, size, group.rank(), table.device, len(table))
    return lambda selected: table.index_select(0, index.index_select(0, selected))


class _FixedAngles:
    """Replacement for the rotary embedding of latent attention; it always returns `result`."""

    def __init__(self, result: list[Any]):
        self._result = result

    def get_rotary_seq_len(self, *unused: Any, **named: Any) -> int:
        return 0

    def __call__(self, *unused: Any, **named: Any) -> Any:
        return self._result if len(self._result) > 1 else self._result[0]


def _latent_angles(attention: Any, hidden: torch.Tensor, params: Any) -> tuple[Any, ...]:
    """Return the rotary angles that latent attention computes for all rows.

    If the model uses Yarn, the result also has Yarn's scale.
    """
    rope = attention.rotary_pos_emb
    length = rope.get_rotary_seq_len(None, None, hidden, attention.config, params)
    table = rope(length, packed_seq=params is not None)
    return table if isinstance(table, tuple) else (table,)

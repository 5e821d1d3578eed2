# SPDX-License-Identifier: Apache-2.0
"""The attention half of a transformer layer, run for some of its rows.

Everything in it but core attention treats rows independently: input norm, projections, rotary
embedding, output gate, bias and residual. So Megatron's own code runs, with the hidden states and
rotary angles of some rows, and `forward` of core attention is replaced meanwhile. Rows of packed
batches come as those of one sequence, with the angles of their places in documents.

Shape letters: s rows of this rank's shard, t tensor-parallel ranks that share them (sequence
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
from ....megatron.data.rope import ALL, HeldRows, is_blank, tables
from ....megatron.patching import instead
from ....planning.plan import Plan

# Core attention of the rows of one chunk: q, k, v [t r, b, heads, width] -> [t r, b, heads, width].
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Reached(NamedTuple):
    """What core attention is called with: q, k, v [t r, b, heads, width], and a kind of mask."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask_type: Any


class _Stop(Exception):
    """Core attention was reached, and the layer need not go on; carries a `Reached`."""


@dataclass(frozen=True)
class ChunkRows:
    """The rows of one chunk: int64 numbers, on the device.

    whole: of the shard [t r], as queries and keys have them; mine: of this rank's hidden states
    [r].
    """

    whole: torch.Tensor
    mine: torch.Tensor


@dataclass(frozen=True)
class AttentionHalf:
    """The attention half of one layer for one micro-batch: all but its hidden states.

    original: `TransformerLayer._forward_attention`; named: what it takes besides hidden states
    and rotary angles. angles: of the rows of the shard, in the form that the layer takes.
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
        """How many tensor-parallel ranks share the rows of the shard."""
        attention = self.layer.self_attention
        split = self.layer.config.sequence_parallel
        return attention.pg_collection.tp.size() if split else 1

    def rows(self, plan: Plan) -> list[ChunkRows]:
        """The rows of every chunk of a plan; the plan has sent their numbers to the device."""
        (rows, *_), _, device = plan.signature[0]
        each = rows // self.blocks
        rank = self.layer.self_attention.pg_collection.tp.rank() if self.blocks > 1 else 0
        chunks = []
        for chunk in plan.rank_plan.chunks:
            whole = torch.arange(rows, device=device) if chunk.rows is None else chunk.rows
            # Ascending, and equally many of each block.
            mine = whole.chunk(self.blocks)[rank] if len(whole) else whole
            chunks.append(ChunkRows(whole, mine - rank * each))
        return chunks

    def parameters(self) -> list[torch.Tensor]:
        """What of the layer gets a gradient here; the sink of core attention does not count."""
        apart = [self.layer.pre_mlp_layernorm, self.layer.mlp]
        others = {id(p) for module in apart for p in module.parameters()}
        others.add(id(self.core.softmax_offset))
        return [p for p in self.layer.parameters() if p.requires_grad and id(p) not in others]

    def run(self, hidden: torch.Tensor, rows: ChunkRows, attend: Attend) -> torch.Tensor:
        """[r, b, H] -> [r, b, H]; `attend` is called with q, k, v [t r, b, heads, width] and
        returns the result of core attention [t r, b, heads, width].
        """

        def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> Any:
            return attend(q, k, v).flatten(2)

        with instead(self.core, "forward", forward), self.angles.only(rows) as angles:
            return self.original(self.layer, hidden, rotary_pos_emb=angles, **self.named)[0]

    def called(self, hidden: torch.Tensor, rows: ChunkRows) -> Reached:
        """What core attention would get for [r, b, H]."""

        def stop(
            q: Any, k: Any, v: Any, _: Any = None, attn_mask_type: Any = None, **__: Any
        ) -> torch.Tensor:
            raise _Stop(Reached(q, k, v, attn_mask_type))

        ranges = len(utils._nvtx_range_messages)
        try:
            with instead(self.core, "forward", stop), self.angles.only(rows) as angles:
                self.original(self.layer, hidden, rotary_pos_emb=angles, **self.named)
        except _Stop as stopped:
            reached: Reached = stopped.args[0]
        else:
            raise RuntimeError("the layer has an attention half that calls no core attention")
        while len(utils._nvtx_range_messages) > ranges:  # of profiling, which the exception left
            utils.nvtx_range_pop()
        return reached


class Angles:
    """Rotary angles of the rows of a shard: a tensor, or one for queries and one for keys.

    given: `rotary_pos_emb` as the layer gets it; params: a `PackedSeqParams` or None. Latent
    attention makes its own angles, of as many rows as its hidden states have: here they are made of
    all rows, and handed to it in place of its module.
    """

    def __init__(self, attention: Any, given: Any, hidden: torch.Tensor, params: Any, rows: int):
        self._owner, self._scale = None, []
        # Of layers with and without a window, of which the layer takes one (Megatron-Bridge).
        self._stacked = isinstance(given, torch.Tensor) and given.dim() == 5
        tables = tuple(given) if self._stacked or isinstance(given, tuple) else (given,)
        if isinstance(attention, MultiLatentAttention):
            table, *self._scale = _latent(attention, hidden, params)
            self._owner, tables = attention, (table,)
        self._tables = [t if t is None else _places(t, attention, params, rows) for t in tables]

    @contextmanager
    def only(self, rows: ChunkRows) -> Iterator[Any]:
        """Inside, the layer's angles are those of some rows; what it takes as rotary_pos_emb."""
        taken = [None if t is None else t(rows.whole) for t in self._tables]
        if self._stacked:
            yield torch.stack([t for t in taken if t is not None])
            return
        if self._owner is None:
            yield tuple(taken) if len(taken) > 1 else taken[0]
            return
        # Found before the submodule of this name.
        vars(self._owner)["rotary_pos_emb"] = _Instead([*taken, *self._scale])
        try:
            yield None
        finally:
            del vars(self._owner)["rotary_pos_emb"]


def _places(
    table: torch.Tensor, attention: Any, params: Any, rows: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Where a table has the angles of given rows of the shard, which has `rows`."""
    if params is None:
        return lambda some: table.index_select(0, some)
    group = group_of(params, attention.pg_collection.cp)
    ends = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
    cut, size = attention.core_attention.cut, group.size()
    if is_blank(table):
        held = ALL if size == 1 else HeldRows(cut.name, size, group.rank())
        # Not held from forward to backward: the tables of few packs are kept at a time.
        return lambda some: tables().of_pack(table, rows, ends, held).index_select(0, some)
    index = packs().of(rows * size, ends).index(cut, size, group.rank(), table.device, len(table))
    return lambda some: table.index_select(0, index.index_select(0, some))


class _Instead:
    """In place of the rotary embedding of latent attention: says what was found before."""

    def __init__(self, result: list[Any]):
        self._result = result

    def get_rotary_seq_len(self, *unused: Any, **named: Any) -> int:
        return 0

    def __call__(self, *unused: Any, **named: Any) -> Any:
        return self._result if len(self._result) > 1 else self._result[0]


def _latent(attention: Any, hidden: torch.Tensor, params: Any) -> tuple[Any, ...]:
    """The table that latent attention makes for all rows, and Yarn's scale if it has one."""
    rope = attention.rotary_pos_emb
    length = rope.get_rotary_seq_len(None, None, hidden, attention.config, params)
    table = rope(length, packed_seq=params is not None)
    return table if isinstance(table, tuple) else (table,)
